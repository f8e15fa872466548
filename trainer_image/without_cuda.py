"""For the CPU variant of the trainer's image: the CUDA libraries that torch names are replaced by empty ones.

The torch of the package registry is built for CUDA, and the loader refuses it without libraries of 2 GB that no CPU
ever calls. Each absent one gets a small library of the same name, with the functions that torch's libraries ask for;
whoever calls one ends with a signal. A torch that was built for CPUs names no such library, and nothing is done.

`python without_cuda.py` in the environment that has torch; needs gcc and binutils.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_FOUND = re.compile(r"^\s*(lib\S+) => not found", re.MULTILINE)
FOUND = re.compile(r"=> (/\S+)")
MAY_BE_ABSENT = ("w", "v")
"""Types of symbols, as nm writes them."""
OF_THE_DRIVER = "libcuda.so.1"
"""Never in an image: what needs it is loaded where there is a driver."""
NEVER_LOADED = "libtorch_cuda_linalg.so"
"""torch loads it when a GPU is to solve something."""


def main() -> int:
    """Replace what is absent; 1 if something is absent that is not CUDA's."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        print("error: there is no torch in this environment", file=sys.stderr)
        return 1
    folder = Path(found.origin).parent / "lib"
    (folder / NEVER_LOADED).unlink(missing_ok=True)
    libraries = sorted(folder.glob("*.so"))
    absent = {name for library in libraries for name in NOT_FOUND.findall(output("ldd", library))} - {OF_THE_DRIVER}
    if not absent:
        return 0
    present = {Path(path) for library in libraries for path in FOUND.findall(output("ldd", library))}
    there = {name for library in present.union(libraries) for name in symbols(library, "--defined-only")}
    wanted = {name: version for each in libraries for name, version in symbols(each, "--undefined-only").items()}
    functions = {name: version for name, version in wanted.items() if name not in there}
    with tempfile.TemporaryDirectory() as scratch:
        made = compiled(functions, Path(scratch))
        for name in sorted(absent):
            output("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", *made, "-o", folder / name)
    print(f"no CUDA libraries: {len(functions)} functions of {', '.join(sorted(absent))} are empty")
    return 0


def compiled(functions: dict[str, str], scratch: Path) -> list[str]:
    """What to link: an object with all the functions, and the versions under which the loader looks for them."""
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
    """Dynamic symbols -> their versions, which may be empty; without those that may be absent."""
    lines = (line.split() for line in output("nm", "--dynamic", which, library).splitlines())
    parts = (words[-1].partition("@") for words in lines if words[-2] not in MAY_BE_ABSENT)
    return {name: version.lstrip("@") for name, _, version in parts}


def output(*command: object) -> str:
    """What a program prints; it has to end well."""
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
