"""Whether a service of compose.yaml can have the GPUs it asks for, said before the engine refuses in its own words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.extras import require


def count_gpus() -> int:
    """NVIDIA GPUs that the driver of this machine knows."""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
        if listed.returncode == 0:
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    known = Path("/proc/driver/nvidia/gpus")
    return len(list(known.iterdir())) if known.is_dir() else 0


def check_service(service: str, found: int | None = None) -> None:
    """Raises UserError where the service is unknown, no engine answers, or there are too few GPUs for it."""
    require("this check", "yaml")
    require("this check", "cluster")
    import yaml

    from ddp_lab.cluster.containers import compose_file, engine_version

    services = yaml.safe_load(compose_file().read_text())["services"]
    layouts = {name: body["environment"] for name, body in services.items() if "LAYOUT" in body.get("environment", {})}
    if service not in layouts:
        raise UserError(f"compose.yaml has no layout {service}; it has {', '.join(sorted(layouts))}")
    try:
        engine_version()
    except UserError as error:
        raise UserError(f"{error}; without containers: make cpu-cluster BACKEND=local", ExitCode.RESOURCES) from None
    asked = layouts[service]
    if asked["DEVICE"] != "cuda":
        return
    found = count_gpus() if found is None else found
    if found < int(asked["NPROC_PER_NODE"]):
        raise UserError(
            f"{service} asks for {asked['NPROC_PER_NODE']} CUDA devices, this machine has {found}; "
            f"the same layout on its CPU: docker compose -f compose.yaml -f compose.cpu.yaml up {service}; "
            f"a layout made for it: make up SERVICE={_alternative(service, found)}",
            ExitCode.RESOURCES,
        )


def _alternative(service: str, found: int) -> str:
    """The nearest service that runs with `found` GPUs."""
    kind = service.partition("-")[0]
    if found == 0:
        return f"{kind}-cpu"
    return "single-gpu" if found == 1 else f"{kind}-2gpu"
