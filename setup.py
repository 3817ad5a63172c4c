"""Adds two steps to the build: the jar of Spark's data source, where there are a JDK and pyspark to compile with, and
the README with links that work outside of the repository.

Everything else is in pyproject.toml. Without them the wheel is built without the jar, and Spark reads through Python.
"""

import importlib.util
import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SOURCES = ROOT / "spark_collector" / "jvm"


def _find_javac():
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("javac", path=os.path.join(home, "bin")) if home else None
    return found or shutil.which("javac")


def _find_spark_jars():
    home = os.environ.get("SPARK_HOME")
    if home and (Path(home) / "jars").is_dir():
        return Path(home) / "jars"
    spec = importlib.util.find_spec("pyspark")
    return Path(spec.origin).parent / "jars" if spec is not None and spec.origin else None


class BuildWithJar(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return  # a development tree compiles what it needs when it needs it
        javac, spark_jars = _find_javac(), _find_spark_jars()
        if javac is None or spark_jars is None:
            missing = (
                "JDK" if javac is None else "pyspark (build with --no-build-isolation, or set SPARK_HOME)"
            )
            self.announce(
                f"brokerless: no {missing}: this wheel has no jar, Spark will read through Python", level=3
            )
            return
        spec = importlib.util.spec_from_file_location(
            "javac", ROOT / "spark_collector" / "session" / "javac.py"
        )
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        target = Path(self.build_lib) / "brokerless" / "spark_collector" / "jvm"
        for old in target.glob("*.jar"):
            old.unlink()  # of other sources, left in build/
        try:
            jar = compiler.compile_jar(Path(javac), spark_jars, SOURCES, target)
            self.announce(f"brokerless: {jar.name} is in this wheel", level=3)
        except compiler.CompileError as error:
            self.announce(f"brokerless: this wheel has no jar, because it does not compile: {error}", level=3)


def _readme():
    """README.md for package indexes: its links lead to the repository, or are text if that has no address yet."""
    text = (ROOT / "README.md").read_text("utf-8")
    repository = os.environ.get("BROKERLESS_REPOSITORY", "").rstrip("/")
    local = r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)"
    if not repository:
        return re.sub(local, r"\1", re.sub(rf"!{local}\n+", "", text))
    text = re.sub(rf"!{local}", rf"![\1]({repository}/raw/HEAD/\2)", text)
    return re.sub(rf"(?<!!){local}", rf"[\1]({repository}/blob/HEAD/\2)", text)


setup(
    cmdclass={"build_py": BuildWithJar},
    long_description=_readme(),
    long_description_content_type="text/markdown",
)
