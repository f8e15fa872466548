"""Replaces the CUDA libraries that torch names by empty ones, in the CPU variant of the trainer's image.

The torch of the package registry is built for CUDA, and the loader refuses it without libraries of 2 GB that no CPU
ever calls. Each absent library gets a small substitute of the same name, with the functions that torch's libraries
import; a call of such a function ends the process with a signal. For a torch built for CPUs the program does nothing.

Run `python without_cuda.py` in the environment that has torch; it needs gcc and binutils.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_FOUND = re.compile(r"^\s*(lib\S+) => not found", re.MULTILINE)
FOUND = re.compile(r"=> (/\S+)")
WEAK_TYPES = ("w", "v")
"""Letters of nm for weak symbols, which may be undefined."""
DRIVER_LIBRARY = "libcuda.so.1"
"""Library of the GPU driver, which no image contains; its users are loaded only where there is a driver."""
NEVER_LOADED = "libtorch_cuda_linalg.so"
"""Library of torch for linear algebra on a GPU, loaded at the first such call; it is deleted."""


def main() -> int:
    """Put empty substitutes in place of the absent CUDA libraries that torch needs; return 1 if there is no torch."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        print("error: there is no torch in this environment", file=sys.stderr)
        return 1
    folder = Path(found.origin).parent / "lib"
    (folder / NEVER_LOADED).unlink(missing_ok=True)
    libraries = sorted(folder.glob("*.so"))
    absent = {name for library in libraries for name in NOT_FOUND.findall(output("ldd", library))} - {DRIVER_LIBRARY}
    if not absent:
        return 0
    functions = missing_functions(libraries)
    with tempfile.TemporaryDirectory() as scratch:
        made = compiled(functions, Path(scratch))
        for name in sorted(absent):
            output("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", *made, "-o", folder / name)
    print(f"no CUDA libraries: {len(functions)} functions of {', '.join(sorted(absent))} are empty")
    return 0


def missing_functions(libraries: list[Path]) -> dict[str, str]:
    """Return the functions that libraries import and no library present defines, name -> symbol version."""
    present = {Path(path) for library in libraries for path in FOUND.findall(output("ldd", library))}
    defined = {name for library in present.union(libraries) for name in symbols(library, "--defined-only")}
    undefined = {name: version for each in libraries for name, version in symbols(each, "--undefined-only").items()}
    return {name: version for name, version in undefined.items() if name not in defined}


def compiled(functions: dict[str, str], scratch: Path) -> list[str]:
    """Compile an object with a function of each name that ends the process; return linker arguments to use it.

    functions: name -> symbol version, which may be empty. The arguments are the object and a version script.
    """
    labels = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in sorted(functions))
    (scratch / "empty.s").write_text(f".text\n{labels}    ud2\n.section .note.GNU-stack\n")
    output("gcc", "-c", scratch / "empty.s", "-o", scratch / "empty.o")
    nodes = ""
    for version in sorted(set(functions.values()) - {""}):
        names = " ".join(f"{name};" for name in sorted(functions) if functions[name] == version)
        nodes += f"{version} {{ {names} }};\n"
    (scratch / "versions").write_text(nodes)
    return [str(scratch / "empty.o"), f"-Wl,--version-script,{scratch / 'versions'}"]


def symbols(library: Path, which: str) -> dict[str, str]:
    """Return a library's dynamic symbols -> their versions, which may be empty; weak symbols are left out."""
    lines = (line.split() for line in output("nm", "--dynamic", which, library).splitlines())
    parts = (words[-1].partition("@") for words in lines if words[-2] not in WEAK_TYPES)
    return {name: version.lstrip("@") for name, _, version in parts}


def output(*command: object) -> str:
    """Return the standard output of a program; raises CalledProcessError if it fails."""
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
