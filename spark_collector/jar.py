"""The data source for the JVM: compiled once from the Java files in `jvm/`, kept in the user's cache.

With it Spark reads spools without a Python process per task, at several times the speed. It needs a Java
compiler, which a JDK has and a JRE has not; without one everything works, through the data source in Python.
"""

import hashlib
import logging
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path

from brokerless.core.errors import Fault
from brokerless.spark_collector.cache import own_directories

log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "jvm"
_SERVICE = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
PROVIDER = "brokerless.spark.Provider"
# Hadoop's local file system without its habit of starting `chmod` for each file.
FILE_SYSTEM = "brokerless.spark.PlainFileSystem"
# Spark 4.0 to 4.3 run on it, so what is compiled for it runs everywhere.
_RELEASE = "17"
# 3 s on an idle machine.
_COMPILE_TIMEOUT_S = 120.0


class JarFailed(Fault):
    """The Java files could not be compiled; `problem` is what the compiler said."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the data source for the JVM cannot be compiled: {problem}")
        self.problem = problem


def find_jar(java: Path) -> Path | None:
    """The jar for the installed pyspark, made now if need be; None if it cannot be had.

    `java` is the home of the Java to compile with. BROKERLESS_PURE=1 in the environment means: do without.
    """
    if os.environ.get("BROKERLESS_PURE") == "1" or not (java / "bin" / "javac").is_file():
        return None
    for directory in own_directories():
        try:
            return make_jar(java, directory)
        except OSError:
            continue  # cannot be written
        except JarFailed as error:
            log.warning("%s; Spark reads through Python instead, which is slower", error)
            return None
    return None


def make_jar(java: Path, directory: Path) -> Path:
    """Compile for the installed pyspark, unless `directory` has it already. Raises JarFailed, OSError."""
    import pyspark

    if not (java / "bin" / "javac").is_file():
        raise JarFailed(f"the Java at {java} has no compiler: install a JDK, and point JAVA_HOME to it")
    spark = Path(pyspark.__file__).parent / "jars"
    sources = sorted(_SOURCES.glob("*.java"))
    digest = hashlib.sha256(pyspark.__version__.encode())
    for source in sources:
        digest.update(source.read_bytes())
    jar = directory / f"brokerless-spark-{digest.hexdigest()[:16]}.jar"
    if jar.is_file():
        return jar
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as work:
        classes = Path(work) / "classes"
        command = [str(java / "bin" / "javac"), "--release", _RELEASE, "-nowarn", "-proc:none"]
        command += ["-cp", f"{spark}/*", "-d", str(classes), *map(str, sources)]
        try:
            done = subprocess.run(  # noqa: S603  # the caller's own Java
                command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise JarFailed(f"javac has not finished after {_COMPILE_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise JarFailed(done.stderr.strip() or f"javac ended with {done.returncode}")
        aside = Path(work) / jar.name
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(_SERVICE, f"{PROVIDER}\n")
            for made in sorted(classes.rglob("*.class")):
                file.write(made, str(made.relative_to(classes)))
        os.replace(aside, jar)  # another process may be starting with this very file
    return jar
