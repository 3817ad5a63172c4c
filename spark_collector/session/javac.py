"""Compiles the data source for the JVM into a jar. Standard library only: the build of the wheel uses it."""

import hashlib
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path

_SERVICE = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
PROVIDER = "brokerless.spark.Provider"
# Spark 4.3 runs on it, so what is compiled for it runs everywhere.
_RELEASE = "17"
# 3 s on an idle machine.
_COMPILE_TIMEOUT_S = 120.0


class CompileError(Exception):
    """What the compiler said."""


def jar_name(sources: Path) -> str:
    """The name of the jar of these Java files: it changes with them, so that an old one is never taken."""
    digest = hashlib.sha256()
    for source in sorted(sources.glob("*.java")):
        digest.update(source.read_bytes())
    return f"brokerless-spark-{digest.hexdigest()[:16]}.jar"


def compile_jar(javac: Path, spark_jars: Path, sources: Path, directory: Path) -> Path:
    """Compile the Java files in `sources` against Spark's jars, unless `directory` has the jar.

    Raises CompileError, OSError.
    """
    jar = directory / jar_name(sources)
    if jar.is_file():
        return jar
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as work:
        classes = Path(work) / "classes"
        command = [str(javac), "--release", _RELEASE, "-nowarn", "-proc:none"]
        command += ["-cp", f"{spark_jars}/*", "-d", str(classes), *map(str, sorted(sources.glob("*.java")))]
        try:
            done = subprocess.run(  # noqa: S603  # the caller's own Java
                command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"javac has not finished after {_COMPILE_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise CompileError(done.stderr.strip() or f"javac ended with {done.returncode}")
        aside = Path(work) / jar.name
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(_SERVICE, f"{PROVIDER}\n")
            for made in sorted(classes.rglob("*.class")):
                file.write(made, str(made.relative_to(classes)))
        os.replace(aside, jar)  # another process may be starting with this very file
    return jar
