"""RunManifest: what one run was made of, so that another one can be compared with it.

    {"version": 2, "run": {...}, "command": {...}, "versions": {...}, "order": {...}, "hardware": {...},
     "environment": {...}, "settings": {...}, "result": {...}, "crc32c": "..."}

Plain JSON. Secrets are left out by the names of their variables. `compare` tells two apart: what may change
results (versions, seeds, order, data, hardware, settings) from what merely is another time or place.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.documents import DocumentKind
from headrace.base.files import replace_file
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# -- hardware ------------------------------------------------------------------------------------------


def hardware(root: Path = Path("/")) -> dict[str, Any]:
    """CPU, memory, GPUs and kernel of this node, as plain values."""
    cpus = _values(root / "proc/cpuinfo", "model name", "cpu", "Model")
    memory = _values(root / "proc/meminfo", "MemTotal") or ["0 kB"]
    # In the order of their bus addresses.
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "architecture": platform.machine(),
        "cpu": cpus[0] if cpus else platform.machine(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": int(memory[0].split()[0]) * 1024,
        "gpus": [model for path in gpus for model in _values(path, "Model")],
        "gpu_driver": _text(root / "proc/driver/nvidia/version").partition("\n")[0].strip(),
        "kernel": platform.release(),
    }


def _values(path: Path, *names: str) -> list[str]:
    """What a file of `NAME: VALUE` lines says under these names."""
    lines = (line.partition(":") for line in _text(path).splitlines())
    return [value.strip() for name, _, value in lines if name.strip() in names]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- manifests -----------------------------------------------------------------------------------------

_KIND = DocumentKind(
    name="a run's manifest",
    version=2,
    unchecked=1,
    error=LaunchError,
    next_step="`headrace launch` writes a manifest for each run: headrace-runs/.",
)
_SCRIPT_BYTES_MAX = 64 << 20

_PACKAGES = (
    "headrace", "numpy", "torch", "torchvision", "tensorflow", "keras", "jax", "jaxlib", "flax", "optax",
    "horovod", "mpi4py", "lightning", "transformers", "pillow", "nvidia-nccl-cu12", "nvidia-cudnn-cu12",
)  # fmt: skip

_VARIABLES = (
    "HEADRACE_*", "NCCL_*", "GLOO_*", "OMP_*", "MKL_*", "OPENBLAS_*", "CUDA_*", "CUBLAS_*", "CUDNN_*",
    "TORCH_*", "PYTORCH_*", "TF_*", "XLA_*", "JAX_*", "OMPI_*", "UCX_*", "PYTHONHASHSEED", "PYTHONPATH",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV", "LOADEDMODULES", "SINGULARITY_NAME",
    "APPTAINER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_CONSTRAINTS", "LANG", "TZ",
)  # fmt: skip
_SECRETS = (
    "*SECRET*", "*TOKEN*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*", "*_KEY", "*_KEY_*", "*APIKEY*",
)  # fmt: skip
_OF_ONE_RUN = (
    "HEADRACE_LAUNCH*", "HEADRACE_JOB_*", "HEADRACE_RUNTIME_DIR", "HEADRACE_RESTARTS", "HEADRACE_HISTORY",
)  # fmt: skip

_INCIDENTAL = ("run.*", "result.*", "hardware.*.host", "environment.*PATH", "environment.TZ")
"""Keys whose difference says that it was another time or place, and nothing of what was computed."""


def versions() -> dict[str, str]:
    """Of Python and of the packages that make a difference, as installed; nothing is imported."""
    out = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change what a run computes, without secrets and without what every run has anew."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if _matches(name, _VARIABLES)
        and not _matches(name.upper(), _SECRETS)
        and not _matches(name, _OF_ONE_RUN)
    }


def script_facts(words: Sequence[str]) -> dict[str, Any]:
    """The user's words, and what the script was: its hash, and the commit it lies in."""
    facts: dict[str, Any] = {"words": list(words), "folder": str(Path.cwd())}
    script = next((w for w in words if w.endswith((".py", ".sh")) and Path(w).is_file()), None)
    if script is not None:
        path = Path(script)
        facts["script"] = script
        if path.stat().st_size <= _SCRIPT_BYTES_MAX:
            facts["script_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        facts["commit"] = _commit(path.resolve().parent)
    return facts


def _commit(folder: Path) -> str | None:
    """The commit that is checked out where a script lies; git itself is not asked, nor needed."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        with contextlib.suppress(OSError):
            if git.is_file():  # a worktree
                git = (parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
            head = (git / "HEAD").read_text().strip()
            name = head.removeprefix("ref: ")
            if name == head:
                return head
            common = _text(git / "commondir").strip()
            for root in (git, *([(git / common).resolve()] if common else [])):
                packed = _text(root / "packed-refs").splitlines()
                commits = [line.split()[0] for line in packed if line.endswith(f" {name}")]
                if commit := _text(root / name).strip() or next(iter(commits), ""):
                    return commit
            return None
    return None


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes it: the old one or the new one, nothing between."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _KIND.encode(manifest, indent=2))
    except OSError as e:
        raise LaunchError(
            f"{path}: the run's manifest cannot be written: {e.strerror}.",
            path=str(path),
            next_step="Name another file: --manifest.",
        ) from e


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads one."""
    where = os.fspath(path)
    try:
        with Path(where).open("rb") as f:
            data = f.read(_KIND.bytes_max + 1)
    except OSError as e:
        raise LaunchError(
            f"{where}: cannot be read: {e.strerror}.", path=where, next_step=_KIND.next_step
        ) from e
    return _KIND.decode(data, where).plain()


@dataclass(frozen=True, slots=True)
class ManifestDifference:
    """One thing that differs.

    Attributes:
        key: where in the manifests: "versions.torch".
        incidental: it is another time or place only.
    """

    key: str
    a: Any
    b: Any
    incidental: bool


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ManifestDifference]:
    """What differs between two manifests, sorted by key; what may change results comes first."""
    flat_a, flat_b = _flat(a), _flat(b)
    differences = [
        ManifestDifference(key, flat_a.get(key), flat_b.get(key), _matches(key, _INCIDENTAL))
        for key in flat_a.keys() | flat_b.keys()
        if flat_a.get(key) != flat_b.get(key)
    ]
    return sorted(differences, key=lambda d: (d.incidental, d.key))


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for name, part in value.items():
            out.update(_flat(part, f"{key}.{name}" if key else str(name)))
        return out
    return {key: value}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
