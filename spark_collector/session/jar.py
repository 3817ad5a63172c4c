"""The data source for the JVM: a jar that the wheel carries, or that a development tree compiles for itself.

With it Spark reads spools without a Python process per task, at several times the speed. Without it everything works,
through the data source in Python. Nothing is compiled on a user's machine, except by `brokerless spark jar`.
"""

import logging
import os
from pathlib import Path

from brokerless.core.errors import Fault
from brokerless.spark_collector.session.cache import own_directories
from brokerless.spark_collector.session.javac import PROVIDER, CompileError, compile_jar, jar_name

log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent.parent / "jvm"
# Hadoop's local file system without its habit of starting `chmod` for each file.
FILE_SYSTEM = "brokerless.spark.PlainFileSystem"

__all__ = ["FILE_SYSTEM", "PROVIDER", "JarFailed", "find_jar", "make_jar", "shipped_jar"]


class JarFailed(Fault):
    """The Java files could not be compiled; `problem` is what the compiler said."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the data source for the JVM cannot be compiled: {problem}")
        self.problem = problem


def shipped_jar(package: Path = _SOURCES) -> Path | None:
    """The jar that was built with the wheel; None if the wheel was built without a JDK or Spark."""
    jar = package / jar_name(package)
    return jar if jar.is_file() else None


def find_jar(java: Path) -> Path | None:
    """The jar to use; None if there is none: Spark reads through Python then.

    `java` is the home of the Java that a development tree compiles with. BROKERLESS_PURE=1 in the environment means:
    do without.
    """
    if os.environ.get("BROKERLESS_PURE") == "1":
        return None
    shipped = shipped_jar()
    if shipped is not None:
        return shipped
    if not _is_development_tree() or not (java / "bin" / "javac").is_file():
        log.info("this installation has no jar of the data source; Spark reads through Python")
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


def _is_development_tree() -> bool:
    return (_SOURCES.parent.parent / "pyproject.toml").is_file()


def make_jar(java: Path, directory: Path) -> Path:
    """Compile for the installed pyspark, unless `directory` has it already. Raises JarFailed, OSError."""
    import pyspark

    if not (java / "bin" / "javac").is_file():
        raise JarFailed(f"the Java at {java} has no compiler: install a JDK, and point JAVA_HOME to it")
    spark = Path(pyspark.__file__).parent / "jars"
    try:
        return compile_jar(java / "bin" / "javac", spark, _SOURCES, directory)
    except CompileError as error:
        raise JarFailed(str(error)) from None
