"""In CI, install the Debian packages that some tests compare against; elsewhere only say what is missing.

The tests that need them are skipped with a reason where they are absent.
"""

import os
import shutil
import subprocess

# command that the tests call → Debian package that has it
WANTED = {
    "tshark": "tshark",
    "chromium": "chromium",
    "pg_ctlcluster": "postgresql",
    "redis-server": "redis-server",
    "nats-server": "nats-server",
    "nft": "nftables",
}


def main() -> None:
    missing = {command: package for command, package in WANTED.items() if not shutil.which(command)}
    if not missing:
        return
    can_install = os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get")
    if not can_install:
        print(f"test: not installed, so their tests are skipped: {', '.join(missing)}")
        return
    print(f"test: installing {', '.join(missing.values())}", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing.values()]):
        subprocess.run(
            ["apt-get", *command],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


if __name__ == "__main__":
    main()
