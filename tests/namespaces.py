"""Two machines: network namespaces with hostnames, processes and temporary folders of their own, and
a link between them that can be cut.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Becomes a command on one machine. Nothing but the network reaches the other: /tmp is shared in
#: truth, so that TMPDIR is a file system of its own.
ENTER = """#!/bin/sh
host=$1; shift
exec ip netns exec {name}-$host unshare --mount --uts --ipc --pid --fork --kill-child \\
    --mount-proc sh -c '
        set -e
        hostname {name}-$0
        mount -t tmpfs none {folder}/tmp
        mount --bind {folder}/hosts /etc/hosts
        export TMPDIR={folder}/tmp
        exec "$@"
    ' $host "$@"
"""
#: A script that mpiexec takes for ssh.
RSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1#{name}-}}; shift
exec {folder}/enter $host sh -c "$*"
"""


class Machines:
    """Two machines, ``a`` and ``b``."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))  # short, for sockets
        number = os.getpid() % 100_000  # a device's name has 15 characters
        self.name = f"smp{number}{next(self._numbers)}"
        self.hosts = [f"{self.name}-a", f"{self.name}-b"]
        self.address = "10.213.77.1"

    def make(self) -> None:
        a, b = self.hosts
        for host in self.hosts:
            _ip("netns", "add", host)
        _ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        lines = ["127.0.0.1 localhost"]
        for number, host in enumerate(self.hosts, start=1):
            address = f"10.213.77.{number}"
            lines.append(f"{address} {host}")
            _ip("-n", host, "address", "add", f"{address}/24", "dev", host)
            _ip("-n", host, "link", "set", host, "up")
            _ip("-n", host, "link", "set", "lo", "up")
        deadline = time.monotonic() + 60
        while not all(map(self.up, self.hosts)):
            assert time.monotonic() < deadline, "the link is not up"
            time.sleep(0.01)
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "tmp").mkdir()
        for name, text in (("enter", ENTER), ("rsh", RSH)):
            path = self.folder / name
            path.write_text(text.format(name=self.name, folder=self.folder))
            path.chmod(0o755)
        subprocess.run(self.on("a", "true"), check=True, capture_output=True, timeout=600)

    def up(self, host: str) -> bool:
        """Return whether the machine's end of the link is up: the kernel takes up to a second to tell, and an MPI that
        starts in that second takes the loopback device instead.
        """
        (device,) = json.loads(_ip("-n", host, "-json", "address", "show", "dev", host))
        tentative = any(address.get("tentative") for address in device["addr_info"])
        return device["operstate"] == "UP" and not tentative

    def on(self, host: str, *words: str) -> list[str]:
        """A command, as one on that machine."""
        return [str(self.folder / "enter"), host, *words]

    def limit(self, rate: int) -> None:
        """From now on the link carries at most so many Mbit/s in each direction."""
        for host in self.hosts:
            words = ["tc", "-n", host, "qdisc", "replace", "dev", host, "root", "tbf"]
            limits = ["rate", f"{rate}mbit", "burst", "256kb", "latency", "100ms"]
            subprocess.run([*words, *limits], check=True, capture_output=True, timeout=600)

    def know_each_other(self) -> None:
        """Each kernel knows the other's hardware address for good, as that of a router.

        A kernel without an answer to ARP ends connections with bytes on their way after three seconds.
        """
        for number, host in enumerate(self.hosts):
            (device,) = json.loads(_ip("-n", host, "-json", "link", "show", "dev", host))
            other, address = self.hosts[1 - number], f"10.213.77.{number + 1}"
            words = ["neigh", "replace", address, "lladdr", device["address"]]
            _ip("-n", other, *words, "nud", "permanent", "dev", other)

    def cut(self) -> None:
        """No packet passes any more, and nobody is told: the link is down at the far end."""
        _ip("-n", self.hosts[1], "link", "set", self.hosts[1], "down")

    def remove(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "delete", host)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=600)
    return done.stdout


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Two machines; the test is skipped where they cannot be made."""
    for program in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(program) is None:
            pytest.skip(f"two machines are made by {program}, which is not here")
    made = Machines()
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"network namespaces are not permitted here: {error.stderr or error}".strip()
            )
        yield made
    finally:
        made.remove()
