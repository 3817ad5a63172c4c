"""The package as users have it: a wheel that is installed, a fresh session, `spark-submit`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.spark_collector import start_cluster, stop_cluster
from brokerless.spark_collector.session.jar import make_jar
from brokerless.spark_collector.session.java import find_java, java_home
from tests.integration.spark_processes import QUICK_JAVA
from tests.spark_collector.spools import fill, open_spool

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parent.parent.parent
# A session that is not ours, and nothing registered: Spark finds the format by itself.
_FRESH = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
import brokerless.core
rows = spark.read.format("brokerless").load(sys.argv[1])
out = {"rows": rows.count(), "from": brokerless.core.__file__}
spark.readStream.format("brokerless").load(sys.argv[1]).writeStream.format("parquet").option(
    "path", sys.argv[2] + "/landed").option("checkpointLocation", sys.argv[2] + "/cp").trigger(
    availableNow=True).start().awaitTermination()
out["streamed"] = spark.read.parquet(sys.argv[2] + "/landed").count()
json.dump(out, open(sys.argv[2] + "/result.json", "w"))
spark.stop()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the built wheel of this package is installed, and nothing else."""
    work = tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    tracked = [name for name in names if (ROOT / name).is_file()]
    if checked := _built_since(max((ROOT / name).stat().st_mtime for name in tracked)):
        return Path(shutil.copytree(checked, work / "site"))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = work / "source"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", work / "dist", source], check=True
    )
    wheel = next((work / "dist").glob("*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--target", work / "site", wheel], check=True)
    return work / "site"


def _built_since(time: float) -> Path | None:
    """Where `make check` has installed the wheel of the sources as they are, with the jar."""
    site = ROOT / "build" / "site"
    installed = list(site.glob("brokerless-*.dist-info/RECORD"))
    whole = installed and list(site.glob("brokerless/spark_collector/jvm/*.jar"))
    return site if whole and installed[0].stat().st_mtime > time else None


def environment(site: Path) -> dict[str, str]:
    """The installed package before this checkout, in the driver and in what it starts."""
    return (
        os.environ
        | QUICK_JAVA
        | {
            "PYTHONPATH": str(site),
            "JAVA_HOME": str(java_home()),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
    )


def finish(command: list[str], site: Path) -> None:
    done = subprocess.run(
        command,
        env=environment(site),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=site.parent,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_a_fresh_session_finds_the_format_of_an_installed_wheel(site: Path, tmp_path: Path) -> None:
    """No import, no register: `format("brokerless")` reads a batch and a stream."""
    with open_spool(tmp_path / "spool") as spool:
        fill(spool, "p", 0, 300)
    finish([sys.executable, "-c", _FRESH, str(tmp_path / "spool"), str(tmp_path)], site)
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["rows"], found["streamed"]) == (300, 300)
    assert found["from"].startswith(str(site)), "the wheel was used, not the checkout"


def test_the_wheel_carries_the_jar(site: Path, tmp_path: Path) -> None:
    """Built where there is a JDK, it has the jar of its own Java files; a session takes it, and compiles nothing."""
    if not (find_java().home / "bin" / "javac").is_file():
        pytest.skip("no Java compiler here")
    (jar,) = (site / "brokerless" / "spark_collector" / "jvm").glob("*.jar")
    look = (
        "from brokerless.spark_collector.session.jar import find_jar; import pathlib; "
        "print(find_jar(pathlib.Path('/none')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", look],
        env=environment(site),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert found.stdout.strip() == str(jar)
    jar.rename(tmp_path / jar.name)
    try:
        without = subprocess.run(
            [sys.executable, "-c", look.replace("'/none'", repr(str(find_java().home)))],
            env=environment(site) | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
    finally:
        (tmp_path / jar.name).rename(jar)
    assert without.stdout.strip() == "None", "an installed package compiles nothing"


@pytest.mark.slow
@pytest.mark.parametrize("with_jar", [True, False])
def test_the_recipe_for_spark_submit(site: Path, tmp_path: Path, with_jar: bool) -> None:
    """The job.py of docs/operations.md, given to spark-submit on a standalone cluster, lands what was spooled."""
    import pyspark

    with open_spool(tmp_path / "spools" / "one") as spool:
        fill(spool, "p", 0, 500)
    page = (ROOT / "docs" / "operations.md").read_text()
    recipe = page.split("```python\n# job.py\n")[1].split("```")[0]
    for location, used in (("/mnt/spools", tmp_path / "spools"), ("/mnt/data", tmp_path / "data")):
        assert location in recipe
        recipe = recipe.replace(location, str(used))
    assert "every_s=30" in recipe
    recipe = recipe.replace(", every_s=30", "")  # ends when everything is landed, instead of never
    (tmp_path / "job.py").write_text(recipe)
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    info = start_cluster(tmp_path / "cluster", workers=2)
    try:
        options = ["--conf", f"spark.pyspark.python={sys.executable}", "--executor-memory", "512m"]
        options += [
            "--conf",
            f"spark.executorEnv.PYTHONPATH={site}",
            "--conf",
            "spark.sql.session.timeZone=UTC",
        ]
        if with_jar:
            jar = make_jar(find_java().home, tmp_path)
            options += ["--jars", str(jar), "--conf", f"spark.brokerless.python={sys.executable}"]
        finish([submit, "--master", info.url, *options, str(tmp_path / "job.py")], site)
    finally:
        stop_cluster(tmp_path / "cluster")
    from deltalake import DeltaTable

    assert DeltaTable(str(tmp_path / "data" / "events")).count() == 500
