"""Tests of the errors that end the Spark job."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from delaylevel.errors import LevelTopicError, UpgradeRequiredError
from delaylevel.spark_sync.job import _raise_if_fatal


@pytest.mark.parametrize("kind", [LevelTopicError, UpgradeRequiredError])
def test_a_level_topic_that_cannot_be_used_ends_the_job(kind: type[LevelTopicError]) -> None:
    text = f"[PYTHON]\nTraceback:\ndelaylevel.errors.{kind.__name__}: it uses 'cancel'\nat org"
    with pytest.raises(kind, match=r"^it uses 'cancel'$") as caught:
        _raise_if_fatal(PySparkException(text))
    assert type(caught.value) is kind
