"""Compiles dataload/storage/_core.c: a build hook of hatchling; by hand, in a clone: `python build_core.py [FLAG ...]`.

Without a C compiler or Python's headers, installation continues without the extension, and dataload uses numpy instead;
with ``DATALOAD_REQUIRE_CORE=1`` in the environment that is an error.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # by hand
    BuildHookInterface = object

ROOT = Path(__file__).parent
SOURCE = ROOT / "dataload/storage/_core.c"
# The stable ABI serves all later versions of Python, but does not exist without the GIL.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") if FREE_THREADED else ".abi3.so"
TARGET = SOURCE.with_name(f"_core_c{SUFFIX}")


def compile_core(*flags: str) -> bool:
    """Compile the extension in the source tree, and return whether that succeeded."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    command = [
        *compiler,
        "-O3",
        "-std=c11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-fPIC",
        "-fvisibility=hidden",
        *shared,
    ]
    temporary = TARGET.with_name(f".{TARGET.name}.{os.getpid()}")  # a running process may have the old one mapped
    include = sysconfig.get_path("include")
    try:
        subprocess.run([*command, f"-I{include}", *flags, str(SOURCE), "-o", str(temporary)], check=True)
        temporary.replace(TARGET)
    except (OSError, subprocess.CalledProcessError) as error:
        temporary.unlink(missing_ok=True)
        print(f"dataload's core was not compiled, so reading will be slower: {error}", file=sys.stderr)
        return False
    return True


class CoreBuildHook(BuildHookInterface):
    """Adds the extension to a wheel, or to the source tree of an editable installation."""

    def initialize(self, version, build_data):
        """See hatchling: called before a build."""
        del version
        if self.target_name != "wheel" or sys.platform == "win32":
            return
        if compile_core():
            build_data["artifacts"].append(f"/dataload/storage/{TARGET.name}")
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            build_data["tag"] = f"{python}-{python}t-{platform}" if FREE_THREADED else f"cp311-abi3-{platform}"
        elif os.environ.get("DATALOAD_REQUIRE_CORE") == "1":
            raise RuntimeError("DATALOAD_REQUIRE_CORE=1, and the core was not compiled")


if __name__ == "__main__":
    sys.exit(not compile_core(*sys.argv[1:]))
