"""Check the Python of README.md and docs/ with `mypy --strict` and pyright's strict mode, as users type it.

The blocks of a page, one after another, are a module. A block that begins with `# name.py` is that file. Parts of files
in examples/ are left out, because examples/ are checked, too. What packages without types cause does not count.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "snippets"  # kept: modules that do not change are not checked again
NOT_INSTALLED = {ROOT / "examples" / f"{name}.py" for name in ("dali_external_source", "torchtitan_loader")}
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - NOT_INSTALLED)
MYPY = ["--strict", "--no-error-summary", "--disable-error-code=import-untyped", "--allow-untyped-calls"]
PYRIGHT = {
    "typeCheckingMode": "strict",
    "venvPath": str(ROOT),
    "venv": ".venv",
    **dict.fromkeys(("reportMissingTypeStubs", "reportUnknownMemberType", "reportUnknownVariableType"), False),
    **dict.fromkeys(("reportUnknownArgumentType", "reportUntypedFunctionDecorator"), False),
}
NOT_TYPED = ("docs/decisions/", "docs/reference/")


def squeezed(code: str) -> str:
    """Return the code without indentation and empty lines."""
    return re.sub(r"\s*\n\s*", "\n", code)


def modules(page: str, text: str, shown: str) -> dict[str, str]:
    """Return the modules of a page by file name. A line has the number that it has on the page."""
    found: dict[str, list[str]] = {}
    for block in re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        code = re.sub(f"^{block[1]}", "", block[2], flags=re.MULTILINE)
        if squeezed(code) in shown:
            continue
        named = re.match(r"# (\w+\.py)\n", code)
        lines = found.setdefault(named[1] if named else "page_" + re.sub(r"\W", "_", page[:-3]) + ".py", [])
        lines += [""] * (text.count("\n", 0, block.start(2)) - len(lines)) + code.splitlines()
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def write_modules() -> dict[str, str]:
    """Write the modules of all pages to BUILD, and return the page of each file."""
    shown = "\n".join(squeezed(path.read_text()) for path in EXAMPLES)
    pages: dict[str, str] = {}
    BUILD.mkdir(parents=True, exist_ok=True)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.relative_to(ROOT).as_posix()
        if page.startswith(NOT_TYPED):
            continue
        for name, code in modules(page, path.read_text(), shown).items():
            file = BUILD / (name if name not in pages else f"{path.stem}_{name}".replace("-", "_"))
            pages[file.name] = page
            if not file.exists() or file.read_text() != code:
                file.write_text(code)
    for file in BUILD.glob("*.py"):
        if file.name not in pages:
            file.unlink()
    return pages


def errors(*command: str) -> list[str]:
    """Return the lines of a type checker about modules of BUILD and examples."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=BUILD, capture_output=True, text=True, check=False, timeout=600
    )
    found = [line.strip() for line in done.stdout.splitlines() if " error: " in line or " - error" in line]
    if done.returncode and not found:
        sys.exit(done.stdout + done.stderr)
    return found


def main() -> int:
    """Print the errors by page and line."""
    pages = write_modules()
    examples = [f"../../examples/{path.name}" for path in EXAMPLES]
    (BUILD / "pyrightconfig.json").write_text(json.dumps({**PYRIGHT, "include": [".", *examples]}))
    found = errors("mypy", *MYPY, *sorted(pages), *examples) + errors("pyright")
    for line in found:
        print(re.sub(r"^\S*?([\w-]+\.py):", lambda file: f"{pages.get(file[1], f'examples/{file[1]}')}:", line))
    print(f"{len(found)} errors in the Python of {len(set(pages.values()))} pages and {len(examples)} examples")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
