"""Makes a release, up to the upload: `python scripts/release.py [--python python3.12 ...]`, in a clean clone.

Checks the version, the changelog and the tree, runs `make check test`, builds sdist and wheel in `dist/`, checks them,
installs each in an empty environment of each interpreter and tries it there, also with the lowest numpy and without a
compiler, and tags the commit. Then it says what is left to do. Nothing leaves the machine. `--draft` only builds and
tries, whatever the version and the tree.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)

SMOKE = """
import contextlib, sys
import numpy as np
import dataload
from dataload.storage.core import core_name

assert dataload.__version__ == sys.argv[1], dataload.__version__
assert core_name() == sys.argv[2], core_name()

def double(sample):
    return {"x": 2 * sample["x"]}

if __name__ == "__main__":
    with dataload.create("tokens.npy", format="tokens") as writer:
        writer.write(np.arange(100))
    assert list(dataload.open("tokens.npy", window=10)[1]["tokens"]) == list(range(9, 19))
    source = dataload.MemorySource({"x": np.arange(100)})
    for executor in ("threads", "processes"):
        with dataload.Loader(
            source, batch_size=10, shuffle=True, num_workers=2, executor=executor, transform=double
        ) as loader:
            state, batches = None, []
            for step, batch in enumerate(loader):
                batches.append(batch["x"])
                state = loader.state_dict() if step == 4 else state
            assert sorted(np.concatenate(batches)) == list(range(0, 200, 2))
            loader.load_state_dict(state)
            assert np.array_equal(np.concatenate([batch["x"] for batch in loader]), np.concatenate(batches[5:]))
    for missing in (lambda: dataload.create("a.lmdb"), lambda: dataload.from_config({})):
        try:
            missing()
        except dataload.errors.MissingDependencyError as error:
            assert "pip install" in str(error), error
        else:
            raise AssertionError("an optional package is there: this environment is not empty")
"""


def main() -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], help="further interpreters to try the packages with")
    parser.add_argument("--draft", action="store_true", help="only build and try; no checks, tests or tag")
    arguments = parser.parse_args()
    version = current_version()
    try:
        if not arguments.draft:
            check(version)
            run("make", "check", "test")
        built = build(version)
        for python in [sys.executable, *arguments.python]:
            for package in built:
                smoke(python, package, version)
        smoke(sys.executable, built[0], version, numpy=lowest_numpy())
        smoke(sys.executable, built[1], version, compiled=False)
    except (Refused, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not arguments.draft:
        run("git", "tag", "--annotate", f"v{version}", "--message", f"dataload {version}")
        print(f"\ndataload {version} is tagged. To publish it: git push origin v{version}; cibuildwheel;")
        print("twine upload dist/*.tar.gz wheelhouse/*. PyPI refuses the wheel in dist/: it is for such machines only.")
    return 0


class Refused(Exception):
    """Something that must be mended before the release."""


def current_version() -> str:
    """Return the version of the package."""
    found = VERSION.search((ROOT / "dataload/__init__.py").read_text())
    assert found, "dataload/__init__.py sets __version__"
    return found[1]


def check(version: str) -> None:
    """Check all that can be known without a build."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise Refused(f"__version__ in dataload/__init__.py is {version}: set it to that of the release, such as 0.2.0")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        raise Refused(f"CHANGELOG.md has no heading of the form '## {version} (2026-01-31)'")
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        raise Refused(f"CITATION.cff names another version: set it to {version}, and its date")
    if output("git", "status", "--porcelain"):
        raise Refused("the tree has changes: commit them first (git status shows them)")
    if output("git", "tag", "--list", f"v{version}"):
        raise Refused(f"the tag v{version} exists: raise __version__, or delete the tag if it was never pushed")


def build(version: str) -> list[Path]:
    """Build sdist and wheel, the latter from the former, and check what they contain."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        run(f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "build")
        run(f"{folder}/bin/python", "-m", "build", "--outdir", str(DIST), str(ROOT))
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    check_wheel(zipfile.ZipFile(wheel).namelist(), version)
    with tarfile.open(sdist) as archive:
        check_sdist([name.partition("/")[2] for name in archive.getnames()])
    return [wheel, sdist]


def check_wheel(names: list[str], version: str) -> None:
    """Check that a wheel has what is no Python module, and nothing but the package."""
    metadata = f"dataload-{version}.dist-info"
    needed = {
        "dataload/py.typed",
        "dataload/analysis/page.css",
        f"{metadata}/entry_points.txt",
        f"{metadata}/licenses/LICENSE",
    }
    if missing := needed - set(names):
        raise Refused(f"the wheel lacks {', '.join(sorted(missing))}")
    if alien := sorted(name for name in names if not name.startswith(("dataload/", f"{metadata}/"))):
        raise Refused(f"the wheel has files outside of the package: {', '.join(alien[:5])}")


def check_sdist(names: list[str]) -> None:
    """Check that an sdist can be built, tested and read."""
    needed = {"pyproject.toml", "build_core.py", "Makefile", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md"}
    if missing := (needed | {"mkdocs.yml", "tests/conftest.py", "dataload/storage/_core.c"}) - set(names):
        raise Refused(f"the sdist lacks {', '.join(sorted(missing))}")


def lowest_numpy() -> str:
    """Return the lowest version of numpy that the package allows."""
    found = re.search(r'^dependencies = \["numpy>=([\d.]+)"]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found, "pyproject.toml has dependencies"
    return found[1]


def smoke(python: str, package: Path, version: str, *, numpy: str | None = None, compiled: bool = True) -> None:
    """Install a package in an empty environment, without a compiler if it is not to be compiled, and use it there."""
    kind = f"{'' if compiled else ' without a compiler'}{f', numpy {numpy}' if numpy else ''}"
    print(f"Trying {package.name} with {python}{kind}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", f"{folder}/venv")
        inside = f"{folder}/venv/bin/python"
        wanted = [str(package), *([f"numpy=={numpy}.*"] if numpy else [])]
        run(inside, "-m", "pip", "install", "--quiet", *wanted, **({} if compiled else {"CC": "false"}))
        Path(folder, "smoke.py").write_text(SMOKE)
        run(inside, "-I", "smoke.py", version, "compiled" if compiled else "numpy", cwd=folder)


def run(*command: str, cwd: str | Path = ROOT, **variables: str) -> None:
    """Run a command with variables added to the environment, and raise if it fails."""
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **variables})


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
