"""What the job leaves for nobody but its user: the quarantine, and the secrets of its options."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from secret_forms import SECRET
from spark_batches import make_batch
from test_spark_batch_job import JOB, submit

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output


def modes(directory: Path) -> set[str]:
    found = {f"{stat.S_IMODE(directory.stat().st_mode):o}"}
    for above, directories, files in os.walk(directory):
        found |= {f"{stat.S_IMODE((Path(above) / name).stat().st_mode):o}" for name in [*directories, *files]}
    return found


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize("before", [None, 0o755])
def test_a_quarantine_is_for_its_owner_alone_whatever_the_umask(spark, tmp_path, umask, before):
    quarantine = tmp_path / "above" / "aside"
    if before is not None:
        quarantine.mkdir(mode=before, parents=True)
        quarantine.chmod(before)
    old = os.umask(umask)
    try:
        for number in "1", "2", "1":
            batch = make_batch(tmp_path / f"b{number}", [b'{"id": 1}', f"x{SECRET}".encode()], batch_id=number)
            run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT", quarantine=str(quarantine))
    finally:
        os.umask(old)
    assert [modes(quarantine / f"batch={number}") for number in "12"] == [{"700", "600"}] * 2
    assert stat.S_IMODE(quarantine.stat().st_mode) == (before or 0o700)  # yours stays as it is
    assert sorted(os.listdir(quarantine)) == ["batch=1", "batch=2"]


def test_settings_and_read_options_may_be_references_and_what_spark_keeps_is_private_as_the_umask_says(tmp_path):
    (tmp_path / "look.py").write_text(
        "import os\n"
        "from pyspark.sql import functions as F\n"
        "def modes(batch):\n"
        "    batch.persist().count()\n"
        "    paths = [os.path.join(at, name) for at, names, _ in os.walk(os.environ['SPARK_LOCAL_DIRS']) for name in names]\n"
        "    session = batch.sparkSession\n"
        "    seen = session.conf.get('spark.qewqew.token'), session.sparkContext._jsc.hadoopConfiguration().get('fs.x.token')\n"
        "    modes = {f'{os.stat(path).st_mode & 0o777:o}' for path in paths}\n"
        "    return batch.withColumn('seen', F.lit(' '.join([*seen, *modes])))\n"
    )
    (tmp_path / "local").mkdir()
    (tmp_path / "key").write_text(f"{SECRET}\n")
    batch = make_batch(tmp_path / "b", [b"a;1"])
    key = json.dumps({"file": str(tmp_path / "key")})
    old = os.umask(0o077)
    try:
        status, printed = submit(
            *("--conf", f"spark.qewqew.token={key}", "--conf", f"spark.hadoop.fs.x.token={key}", JOB, batch),
            *("--output", json.dumps({"path": str(tmp_path / "out"), "format": "csv", "transform": "look:modes"})),
            *("--codec", "csv", "--schema", "name STRING, id INT", "--read-option", 'sep={"env": "SEP"}'),
            cwd=tmp_path,
            SPARK_LOCAL_DIRS=str(tmp_path / "local"),
            PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}",
            SEP=";",
        )
    finally:
        os.umask(old)
    assert status == 0, printed
    found = [file.read_text() for file in (tmp_path / "out" / "batch=orders-1a2b").glob("part-*")]
    assert found == [f"a,1,{SECRET} {SECRET} 700\n"]
    assert SECRET not in "\n".join(printed)


def test_a_secret_of_an_option_is_in_no_error(spark, tmp_path, monkeypatch):
    """Neither that of a reference, nor one that Python code gives."""
    batch = make_batch(tmp_path / "b", [b'{"id": 1}'])
    monkeypatch.setenv("URL", f"jdbc:derby:{tmp_path}/none/{SECRET};user=me;password={SECRET}")
    for url in {"env": "URL"}, os.environ["URL"], f"jdbc:nothing:x;pwd={SECRET}", f"jdbc:derby://me:{SECRET}@h/x":
        output = Output(format="jdbc", options={"url": url, "dbtable": "t", "password": SECRET})
        with pytest.raises(BadArgument, match="table t") as caught:
            run(spark, str(batch), [output], schema="id INT", quarantine=str(tmp_path / "aside"))
        assert SECRET not in str(caught.value)
