"""Diagnostic texts: advice on the number of CPU threads, and the report of changed gradients."""

import os
import re

from torchddp import _C
from torchddp.diagnose.changed_gradients import describe
from torchddp.diagnose.cpu_threads import RankThreads, advice


def ranks(count, threads, processors=16, *, bound=None, quota=0, by_variable=False):
    """``bound``: each rank's affinity, out of `processors`."""
    machine = list(range(processors))
    return [
        RankThreads("host", threads, machine if bound is None else bound[rank], machine, quota, by_variable)
        for rank in range(count)
    ]


def test_too_many_or_too_few_threads_are_reported_with_the_number_to_set():
    for threads, words in (
        (ranks(4, 16), "The 4 ranks of this host have 16 threads each, 64 in all, for 16 processors, .*_THREADS=4 "),
        (ranks(4, 16, 64, quota=8), r"for 8 processors \(the control group's limit; 64 can .*OMP_NUM_THREADS=2 "),
        (ranks(1, 64, 64, quota=4), r"This rank has 64 threads for 4 processors .*OMP_NUM_THREADS=4 "),
        (ranks(2, 8, bound=[[0, 1], [2, 3]]), "16 in all, for 4 processors, .* OMP_NUM_THREADS=2 "),
        (ranks(4, 1, bound=[[0]] * 4), "to processor 0 of 16, .* each rank to 4 .*OMP_NUM_THREADS=4"),
        (ranks(3, 1, bound=[[0], [0], [1]]), "bound to processors 0, 1 of 16.* each rank to 5 "),
        (ranks(2, 1, by_variable=True), "1 thread each for 16 processors: most of them idle.* OMP_NUM_THREADS=8 "),
    ):
        assert re.search(words, advice(threads)), (words, advice(threads))
    for fits in (
        ranks(4, 4),
        ranks(4, 1),  # set by torch.set_num_threads(1): intended
        ranks(8, 1, by_variable=True),
        ranks(4, 5),  # slightly more threads than processors
        ranks(1, 16),
        ranks(4, 1, 2),  # more ranks than processors: no setting helps
        ranks(2, 1, 1, by_variable=True),
        ranks(2, 2, bound=[[0, 1], [2, 3]]),
        ranks(8, 2, 64, quota=16),
        ranks(4, 1, 16, bound=[[0]] * 4, quota=1),  # the quota allows only one
    ):
        assert advice(fits) == "", fits
    own = RankThreads.of_this_process()
    assert own.processors == sorted(os.sched_getaffinity(0)) and own.host == _C.host_identity()
    assert own.quota == _C.processor_quota() >= 0


def test_changed_gradients_are_reported_by_parameter_and_rank():
    for changes, words in (
        (["00", "10", "00"], "'a' was changed on rank 1; left as backward gave it on ranks 0 and 2"),
        (
            ["22", "00", None],
            "'a' was set to None on rank 0; left as backward gave it on rank 1; ranks also differ on 'b'",
        ),
        (["03", "00"], "that of 'b' was replaced by another tensor on rank 0; left as backward gave it on rank 1"),
        (["11", "11"], ""),
        (["10", None, None], ""),
    ):
        text = describe(changes, ["a", "b"])
        assert text.endswith(words) and bool(text) == bool(words), (changes, text)
