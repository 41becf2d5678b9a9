"""Nodes as containers that can be broken: every verb is one call of the engine's API."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import docker.errors

from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.chaos.drill import RENDEZVOUS, Drill, Planned
from ddp_lab.chaos.faults import BeginAndEnd
from ddp_lab.cluster.cluster import Spec, Write
from ddp_lab.cluster.containers import ContainerBackend, copy_output

_HERE = Path(__file__).parent
_INSIDE = "/app/ddp_lab/chaos"
_DISK_MEGABYTES = 64
_GRACE_SECONDS = 60


class BreakableContainers(ContainerBackend):
    """A cluster of containers, with the faults of a drill.

    A drill that fills the disk gets a small volume for /outputs, which a container without network copies to the output
    directory. A drill that slows a link gets the capability NET_ADMIN.
    """

    kinds = frozenset({"kill", "stop", "pause", "partition", "slow", "throttle", "disk-full", "oom", "down"})

    def __init__(self, drill: Drill) -> None:
        self._small = drill.has("disk-full")
        files = ["compose.yaml"]
        files += [str(_HERE / "compose.small-disk.yaml")] if self._small else []
        files += [str(_HERE / "compose.slow.yaml")] if drill.has("slow") else []
        super().__init__(files=files)
        self._write: Write = lambda node, line: None
        self._cut_off: dict[str, tuple[Any, list[str]]] = {}
        self._mirror: Any = None
        self._volume: Any = None

    def start(self, spec: Spec) -> None:
        """Make the small volume first, where the drill needs one."""
        spec.output.mkdir(parents=True, exist_ok=True)
        if self._small:
            self._make_small_disk(spec)
        super().start(spec)

    def follow(self, write: Write) -> None:
        """Hand over the output of every node, and again after a node or the rendezvous was started again."""
        self._write = write
        super().follow(write)

    def container(self, name: str) -> Any:
        """The docker SDK's object for a node or the rendezvous."""
        if name != RENDEZVOUS:
            return super().container(name)
        labels = [f"com.docker.compose.project={self._project}", f"com.docker.compose.service={RENDEZVOUS}"]
        return self._client.containers.list(all=True, filters={"label": labels})[0]

    def is_running(self, name: str) -> bool:
        """Whether the container runs; a paused one does."""
        with contextlib.suppress(docker.errors.NotFound, IndexError):
            return bool(self._client.api.inspect_container(self.container(name).id)["State"]["Running"])
        return False

    def kill(self, name: str) -> float:
        """SIGKILL to everything in the container, as if the machine were gone; returns the engine's time of its end."""
        container = self.container(name)
        container.kill()
        container.reload()
        finished = str(container.attrs["State"]["FinishedAt"])
        return datetime.fromisoformat(finished[:26].rstrip("Z") + "+00:00").timestamp()

    def stop_one(self, name: str) -> None:
        """Stop the container as `docker stop` does."""
        self.container(name).stop(timeout=_GRACE_SECONDS)

    def begin_and_end(self, fault: Planned, node: str) -> BeginAndEnd:
        """How a fault that is neither a kill nor a stop begins, and how it ends."""
        pairs: dict[str, BeginAndEnd] = {
            "pause": (lambda: self.container(node).pause(), lambda: self.container(node).unpause()),
            "partition": (lambda: self.cut_off(node), lambda: self.reconnect(node)),
            "slow": (lambda: self.slow_down(node, fault.rate), lambda: self.speed_up(node)),
            "throttle": (lambda: self.throttle(node, fault.share), lambda: self.let_run(node)),
            "oom": (lambda: self.starve(node), lambda: self.feed(node)),
            "disk-full": (lambda: self._in_mirror("fill"), lambda: self._in_mirror("free")),
            "down": (self.take_down, self.bring_up),
        }
        return pairs[fault.kind]

    def cut_off(self, name: str) -> None:
        """Take the container off its network."""
        container = self.container(name)
        (network,) = self._client.networks.list(filters={"label": f"com.docker.compose.project={self._project}"})
        attached = self._client.api.inspect_container(container.id)["NetworkSettings"]["Networks"][network.name]
        self._cut_off[name] = (network, attached.get("Aliases") or [])
        network.disconnect(container)

    def reconnect(self, name: str) -> None:
        """Bring the container back to its network, under its old names."""
        network, aliases = self._cut_off.pop(name)
        network.connect(self.container(name), aliases=aliases)

    def slow_down(self, name: str, rate: int) -> None:
        """Limit what the container sends to `rate` kbit/s, with a token bucket (tbf) on its own interface."""
        self._shape(name, str(rate))

    def speed_up(self, name: str) -> None:
        """Take the limit away."""
        self._shape(name, "0")

    def _shape(self, name: str, rate: str) -> None:
        # This command runs as root in the container, with NET_ADMIN as its one capability; the training runs without.
        done = self.container(name).exec_run(["python", f"{_INSIDE}/shape.py", "eth0", rate], user="0")
        if done.exit_code != 0:
            raise UserError(f"cannot shape the link of {name}: {_last(done.output)}", ExitCode.RESOURCES)

    def throttle(self, name: str, share: float) -> None:
        """Give the container `share` of one core."""
        self.container(name).update(cpu_period=100_000, cpu_quota=int(share * 100_000))

    def let_run(self, name: str) -> None:
        """Give the container all cores again."""
        self.container(name).update(cpu_period=100_000, cpu_quota=-1)

    def starve(self, name: str) -> None:
        """Leave the container little spare memory, and use that up: the kernel then kills its largest process."""
        container = self.container(name)
        memory = container.stats(stream=False)["memory_stats"]
        # The kernel frees its cache of files before it kills anything, so that cache does not count as used.
        cached = sum(memory["stats"].get(name, 0) for name in ("active_file", "inactive_file"))
        limit = memory["usage"] - cached + 64 * 2**20
        container.update(mem_limit=limit, memswap_limit=limit)
        container.exec_run(["python", f"{_INSIDE}/hog.py"], detach=True)

    def feed(self, name: str) -> None:
        """Give the container memory again, up to 16 GiB."""
        with contextlib.suppress(docker.errors.APIError):
            self.container(name).update(mem_limit=16 * 2**30, memswap_limit=16 * 2**30)

    def start_again(self, name: str) -> None:
        """Start a container that has ended, with the same command."""
        container = self.container(name)
        since = time.time()
        container.start()
        self._listen(name, container, since)

    def scale(self, count: int) -> None:
        """`docker compose up --scale node=COUNT`: start further nodes beside those that there are."""
        before = set(self._containers)
        self._compose("up", "--detach", "--no-build", "--no-recreate", "--scale", f"node={count}", "node")
        self._find("node")
        for name in self._containers.keys() - before:
            self._listen(name, self._containers[name], None)

    def take_down(self) -> None:
        """`docker compose down`: the nodes save and leave, then all containers and the network are removed."""
        self._compose("--profile", "cluster", "down", "--timeout", str(_GRACE_SECONDS))

    def bring_up(self) -> None:
        """`docker compose up` with the same rendezvous id: fresh containers, the same run."""
        assert self._spec is not None
        super().start(self._spec)
        for name, container in self._containers.items():
            self._listen(name, container, None)

    def exit_codes(self) -> dict[str, int]:
        """The exit codes of the nodes that have ended."""
        with contextlib.suppress(docker.errors.NotFound):
            return {name: result.exit_code for name, result in self.results().items()}
        return {}

    def holds(self, name: str, host: str, pid: int) -> bool:
        """Whether a process with this host name runs in the container."""
        return bool(self.container(name).id.startswith(host))

    def settle(self) -> None:
        """Copy the last changes from the small volume."""
        if self._mirror is not None:
            self._in_mirror("copy")

    def stop(self) -> None:
        """Remove the project, the copying container and the small volume."""
        for name in list(self._cut_off):
            with contextlib.suppress(docker.errors.APIError):
                self.reconnect(name)
        for name in self._containers:
            with contextlib.suppress(docker.errors.APIError):
                self.container(name).unpause()
        if self._mirror is not None:
            self._mirror.remove(force=True)
            self._mirror = None
        if self._spec is not None:
            self._compose("--profile", "*", "down", "--timeout", "1", "--remove-orphans")
        if self._volume is not None:
            self._volume.remove(force=True)
            self._volume = None

    def left_behind(self) -> list[str]:
        """Containers, networks and volumes that are still there; closes the connection to the engine."""
        label: dict[str, Any] = {"label": f"com.docker.compose.project={self._project}"}
        found = [str(container.name) for container in self._client.containers.list(all=True, filters=label)]
        found += [str(network.name) for network in self._client.networks.list(filters=label)]
        found += [str(volume.name) for volume in self._client.volumes.list(filters={"name": self._project})]
        self._client.close()
        return found

    def _listen(self, name: str, container: Any, since: float | None) -> None:
        thread = threading.Thread(target=copy_output, args=(name, container, self._write, since), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _make_small_disk(self, spec: Spec) -> None:
        """A volume in memory, owned like the output directory, and the container that keeps and copies it."""
        assert self._small
        self._spec = spec
        owner = spec.output.stat()
        name = f"{self._project}-small"
        options = f"size={_DISK_MEGABYTES}m,mode=0755,uid={owner.st_uid},gid={owner.st_gid}"
        self._volume = self._client.volumes.create(
            name, driver="local", driver_opts={"type": "tmpfs", "device": "tmpfs", "o": options}
        )
        self.variables["DDP_SMALL_VOLUME"] = name
        self._mirror = self._client.containers.run(
            self.image,
            ["python", f"{_INSIDE}/mirror.py", "/small", "/outputs"],
            detach=True,
            init=True,
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            user=f"{owner.st_uid}:{owner.st_gid}",
            name=f"{self._project}-mirror",
            volumes={
                name: {"bind": "/small", "mode": "rw"},
                str(spec.output.resolve()): {"bind": "/outputs", "mode": "rw"},
                str(_HERE): {"bind": _INSIDE, "mode": "ro"},
            },
        )

    def _in_mirror(self, verb: str) -> None:
        done = self._mirror.exec_run(["python", f"{_INSIDE}/mirror.py", "/small", "/outputs", verb])
        if done.exit_code != 0:
            raise UserError(f"cannot {verb} the small disk: {_last(done.output)}", ExitCode.RESOURCES)


def _last(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
