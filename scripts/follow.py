"""Follow a page of the documents in the current directory: `follow.py PAGE [OLD=NEW]`, where OLD becomes NEW in it.

Python is run block by block, commands in a shell; a block that begins with `# name.py` is saved as that file. The
time of each part of the page is printed. Only the standard library is needed.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMANDS = ("dataload ", "mkdir ", "python ")


def follow(page: Path, old: str = "", new: str = "") -> None:
    """Run what the page shows."""
    text = page.read_text("utf-8").replace(old, new) if old else page.read_text("utf-8")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    scope: dict[str, Any] = {"__name__": "page"}
    sys.path.insert(0, os.getcwd())
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        begun = time.perf_counter()
        blocks = re.findall(r"^```(\w+)\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
        for language, block in blocks:
            name = re.match(r"# ([\w./-]+\.\w+)\n", block)
            if name:
                Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
                Path(name[1]).write_text(block, "utf-8")
            elif language == "python":
                exec(compile(block, str(page), "exec"), scope)
            elif language == "sh":
                for line in block.replace("\\\n", " ").splitlines():
                    if line.startswith(COMMANDS):
                        done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True)
                        if done.returncode != ("# ends with 1" in line):
                            sys.exit(f"{page.name}: {line}\n{done.stdout}{done.stderr}")
        if blocks:
            print(f"{time.perf_counter() - begun:6.1f} s  {page.stem}: {part.splitlines()[0].lstrip('# ')}", flush=True)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), *(sys.argv[2].split("=", 1) if len(sys.argv) > 2 else ()))
