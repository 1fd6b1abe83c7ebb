"""The class under test passes every named check, and so does the device code path, which packs whole buckets."""

import pytest

from tests.behaviors import BEHAVIORS, BEYOND_TORCH, results_of
from tests.harness import class_under_test, is_own_class
from tests.whole_buckets import LargeApart, WholeBuckets

OWN_WAY = pytest.mark.beyond_torch("packs whole buckets in its own way")


@pytest.mark.parametrize(
    "kind", [class_under_test(), *(pytest.param(kind, marks=OWN_WAY) for kind in (WholeBuckets, LargeApart))]
)
def test_behaviors(kind, tmp_path):
    names = [name for name in BEHAVIORS if is_own_class() or name not in BEYOND_TORCH]
    results = results_of(kind, names, tmp_path)
    failed = "\n".join(f"{name}: {error}" for name, error in results.items() if error)
    assert not failed and list(results) == names, failed
