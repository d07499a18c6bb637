from pathlib import Path

from benches.fuzz_torch_zip import run


def test_damaged_and_hostile_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    # A few hundred of the inputs of `python -m benches.fuzz_torch_zip`, which is run by hand over 20,000 and more.
    record = run(500, 7, tmp_path)
    assert record.failures == []
    outcomes = {outcome for _, outcome in record.outcomes}
    assert outcomes == {"read", "refused"}
    assert {kind for kind, _ in record.outcomes} >= {"flipped", "cut", "lying directory", "pickle", "stream", "bare"}
