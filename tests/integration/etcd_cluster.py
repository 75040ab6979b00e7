"""A real etcd of one or three members on this machine's loopback."""

import os
import subprocess
import time
import urllib.request
from contextlib import suppress

from ibshell.pool import free_ports


class Cluster:
    """Members that can be killed and started again.

    Args:
        directory: for their data.
        program: path of etcd.
        members: how many.
    """

    def __init__(self, directory, program, members=1):
        self.directory = directory
        self.program = program
        ports = free_ports(2 * members)
        self.ports = list(zip(ports[::2], ports[1::2], strict=True))
        self.processes = {}
        for number in range(members):
            self.start(number)
        self.until_healthy()

    @property
    def url(self):
        return "etcd://" + ",".join(f"127.0.0.1:{client}" for client, _ in self.ports)

    def start(self, number):
        client, peer = self.ports[number]
        cluster = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, (_, port) in enumerate(self.ports))
        with (self.directory / f"etcd{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [
                    self.program,
                    f"--name=m{number}",
                    f"--data-dir={self.directory / f'etcd{number}'}",
                    f"--listen-client-urls=http://127.0.0.1:{client}",
                    f"--advertise-client-urls=http://127.0.0.1:{client}",
                    f"--listen-peer-urls=http://127.0.0.1:{peer}",
                    f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                    f"--initial-cluster={cluster}",
                    "--heartbeat-interval=100",
                    "--election-timeout=1000",
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )

    def until_healthy(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(OSError):
                answers = [
                    urllib.request.urlopen(f"http://127.0.0.1:{client}/health", timeout=2).read()
                    for client, _ in self.ports
                ]
                if all(b'"true"' in answer for answer in answers):
                    return
            time.sleep(0.1)
        raise AssertionError("etcd does not become healthy")

    def kill(self, number):
        process = self.processes.pop(number)
        process.kill()
        process.wait()

    def stop(self):
        for number in list(self.processes):
            self.kill(number)
