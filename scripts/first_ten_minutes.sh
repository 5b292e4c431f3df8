#!/usr/bin/env bash
# Does what a new user does in an empty environment: `scripts/first_ten_minutes.sh WHEEL`. It follows README and
# tutorials as they are typed: a folder of images, its tar files (WebDataset's), CSV, JSON Lines, Parquet, and a bucket
# of an S3 server. Prints the seconds of each part, without downloads, and fails if they take more than LIMIT together.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "${1:?give a wheel; scripts/release.py --draft builds one in dist/}")
limit=${LIMIT:-240}
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT INT TERM
export HOME=$here/home # without anybody's caches and settings
mkdir "$HOME"

extras=cli,tar,arrow,remote,torch # README: extras for what you do
"${PYTHON:-$root/.venv/bin/python}" -m pip download --quiet --dest "$here/wheels" -c "$root/constraints.txt" "$wheel[$extras]"
"${PYTHON:-$root/.venv/bin/python}" -m venv "$here/venv" # of the version that the wheels are for
python=$here/venv/bin/python
"$python" -m pip install --quiet --no-index --find-links "$here/wheels" torch # half a gigabyte, which others have installed

begun=$(date +%s)
timed() {
    local from=$EPOCHREALTIME
    "${@:2}"
    awk -v a="$from" -v b="$EPOCHREALTIME" -v what="$1" 'BEGIN { printf "%6.1f s  %s\n", b - a, what }'
}
cd "$here"
timed "pip install dataload[$extras]" "$python" -m pip install --quiet --no-index --find-links wheels "$wheel[$extras]"
timed "dataload --version" venv/bin/dataload --version
for page in README.md docs/tutorials/images.md docs/tutorials/tables.md; do
    mkdir "$here/$(basename "$page" .md)" && cd "$here/$(basename "$page" .md)"
    "$python" "$root/scripts/follow.py" "$root/$page" >../out || { cat ../out; exit 1; }
    grep ' s  ' ../out
done

# The server is ours, so it runs in our environment; its user only has the credentials.
mkdir "$here/bucket" && cd "$here/bucket"
PYTHONPATH=$root/tests/support "$root/.venv/bin/python" - "$python" "$root" <<'PY'
import os, subprocess, sys
from object_server import ObjectServer

python, root = sys.argv[1:]
with ObjectServer() as server:
    bucket = f"s3://my-bucket={server.url(server.bucket())}"
    command = [python, f"{root}/scripts/follow.py", f"{root}/docs/tutorials/bucket.md", bucket]
    environment = {**os.environ, **server.environment()}
    environment.pop("PYTHONPATH")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
print(*(line for line in done.stdout.splitlines() if " s  " in line), sep="\n")
PY

seconds=$(($(date +%s) - begun))
echo "$seconds s in all, without downloads"
test "$seconds" -lt "$limit" || { echo "error: that is more than $limit s" >&2; exit 1; }
