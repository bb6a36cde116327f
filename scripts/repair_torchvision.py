"""Remove a torchvision that was built for another torch; run with the Python of the environment.

pip may put PyPI's CUDA builds of torchvision, torchaudio and torchcodec beside a CPU build of torch.
Importing models then fails ("operator torchvision::nms does not exist"). vLLM's text models need none of
the three. A pair that imports is left alone.
"""

import importlib.util
import subprocess
import sys

FAMILY = ("torchvision", "torchaudio", "torchcodec")


def imports(name: str) -> bool:
    """In a process of its own: a failed import leaves operators half registered."""
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def broken() -> bool:
    """Whether torchvision is installed and fails to import although torch does import."""
    return (
        importlib.util.find_spec("torchvision") is not None
        and not imports("torchvision")
        and imports("torch")
    )


def main() -> int:
    if not broken():
        return 0
    print(f"torchvision does not match torch: removing {', '.join(FAMILY)} (text models need none of them)")
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *FAMILY]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
