"""Install the Debian packages that some tests need: what `make test` runs first.

As root on a machine with apt they are installed. Elsewhere this names what is missing, and which tests are skipped
because of it. It never fails: tests that need a missing program are skipped with that reason.
"""

import os
import shutil
import subprocess
from pathlib import Path

# program → (Debian package, what is skipped without it)
WANTED = {
    "tshark": ("tshark", "that Wireshark reads our multicast stream"),
    "chromium": ("chromium", "the console and the HTML report in a browser"),
    "pg_ctlcluster": ("postgresql", "the webhook outbox on PostgreSQL"),
    "redis-server": ("redis-server", "the loss test of Redis Streams"),
    "nats-server": ("nats-server", "the loss test of NATS JetStream"),
    "nft": ("nftables", "packet loss by the kernel"),
    "promtool": ("prometheus", "alert rules and the Prometheus text format"),
    "node": ("nodejs", "clients in JavaScript"),
    "npm": ("npm", "clients in JavaScript"),
    "javac": ("default-jdk-headless", "Spark's data source in Java"),
    "systemd-analyze": ("systemd", "the systemd units"),
}
# Debian keeps some programs outside of the path of ordinary users.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


def missing() -> list[str]:
    """The programs that are not installed."""
    return [program for program in WANTED if not shutil.which(program, path=PATH)]


def install(programs: list[str]) -> None:
    """Install the packages of these programs, and let none of the servers start by itself."""
    packages = sorted({WANTED[program][0] for program in programs})
    print(f"test: installing {', '.join(packages)}", flush=True)
    policy = Path("/usr/sbin/policy-rc.d")
    guarded = not policy.exists()
    if guarded:  # Debian's way to say that installing a server must not start it
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(["apt-get", "-q", "update"], env=env, capture_output=True, check=False)
        # One by one: a package that this release does not have must not keep the others away.
        for package in packages:
            command = ["apt-get", "-q", "install", "-y", "--no-install-recommends", package]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"test: {package} could not be installed: {last_line(done.stderr)}")
    finally:
        if guarded:
            policy.unlink()


def last_line(text: str) -> str:
    """What a program said last."""
    return (text.strip().splitlines() or ["no message"])[-1]


def main() -> None:
    absent = missing()
    if absent and os.geteuid() == 0 and shutil.which("apt-get") and not os.environ.get("BROKERLESS_NO_APT"):
        install(absent)
        absent = missing()
    elif absent:
        print("test: not root, or no apt: nothing is installed")
    for program in absent:
        package, what = WANTED[program]
        print(f"test: skipped without {program} (package {package}): {what}")


if __name__ == "__main__":
    main()
