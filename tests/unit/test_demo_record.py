"""What ranks record, read back across kills."""

from __future__ import annotations

from pathlib import Path

from demo.record import Recorder, StepReader, rank_file


def test_steps_come_back_bit_for_bit(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder.step(1, 0, 0.1 + 0.2, [[1, 2], [1 << 40]])
    recorder.close()
    ((step,),) = StepReader(tmp_path, 0).attempts()
    assert float.fromhex(step.loss) == 0.1 + 0.2
    assert (step.step, step.epoch, step.ids) == (1, 0, ((1, 2), (1 << 40,)))


def test_nothing_recorded_yet(tmp_path: Path) -> None:
    assert StepReader(tmp_path, 0).attempts() == []


def test_a_line_cut_by_a_kill_is_left_out_and_the_next_attempt_is_whole(tmp_path: Path) -> None:
    reader = StepReader(tmp_path, 1)
    first = Recorder(tmp_path, 1)
    first.step(1, 0, 1.0, [[1]])
    first.step(2, 0, 2.0, [[2]])
    first.close()
    path = rank_file(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-9])
    assert [[s.step for s in a] for a in reader.attempts()] == [[1]]
    second = Recorder(tmp_path, 1)
    second.step(2, 0, 2.5, [[2]])
    assert [[s.loss for s in a] for a in reader.attempts()] == [[(1.0).hex()], [(2.5).hex()]]
    second.step(3, 0, 3.0, [[3]])
    second.close()
    assert [[s.step for s in a] for a in reader.attempts()] == [[1], [2, 3]]
    assert reader.attempts() == StepReader(tmp_path, 1).attempts()


def test_same_work_ignores_only_the_clock(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    for loss in (1.0, 1.0, 1.0 + 2**-52):
        recorder.step(5, 0, loss, [[7]])
    recorder.close()
    ((a, b, c),) = StepReader(tmp_path, 0).attempts()
    assert a.same_work(b)
    assert not a.same_work(c)
