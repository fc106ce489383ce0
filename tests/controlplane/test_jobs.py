"""Jobs: how far they are, cancelled before and while they run, and a worker that dies is not waited for."""

import subprocess
import sys
import textwrap
import threading

import pytest

from controlplane.jobs import Job, gently


def test_a_job_that_was_asked_for_tells_its_progress_and_its_answer(tmp_path):
    job, seen = Job(tmp_path, "one"), []
    assert job.read() is None
    job.ask({"asked_by": "ada"})
    assert (job.read()["state"], job.read()["asked_by"]) == ("waiting", "ada")

    def work(progress):
        assert progress(0.5, "half of it")
        seen.append(job.read())
        return {"answer": 42}

    job.carry_out({"quick": True}, work)
    assert (seen[0]["state"], seen[0]["progress"], seen[0]["step"]) == ("running", 0.5, "half of it")
    assert {"state": "done", "answer": 42, "asked_by": "ada", "quick": True}.items() <= job.read().items()


def test_a_job_cancelled_before_a_worker_takes_it_is_not_begun_and_can_be_asked_for_again(tmp_path):
    job = Job(tmp_path, "one")
    job.ask({})
    job.cancel()
    assert job.read()["state"] == "cancelled"
    assert job.carry_out({}, lambda progress: pytest.fail("it was begun"))["state"] == "cancelled"
    job.ask({})
    assert job.carry_out({}, lambda progress: {})["state"] == "done"


def test_a_job_cancelled_meanwhile_keeps_what_it_has(tmp_path):
    job = Job(tmp_path, "one")

    def work(progress):
        progress(0.0, "first")
        assert "stopping" not in job.read()
        job.cancel()
        assert (job.read()["state"], job.read()["stopping"]) == ("running", True)
        assert not progress(0.1, "next")
        return {"trials": 1}

    ended = job.carry_out({}, work)
    assert {"state": "cancelled", "trials": 1}.items() <= ended.items()
    assert "stopping" not in ended and "stopping" not in job.read()


def test_a_failure_is_noted_and_raised(tmp_path):
    job = Job(tmp_path, "one")
    with pytest.raises(ZeroDivisionError):
        job.carry_out({}, lambda progress: {"x": 1 / 0})
    assert job.read()["state"] == "failed" and "ZeroDivisionError" in job.read()["problem"]


def test_two_workers_do_not_do_one_job(tmp_path):
    job, began, may_end = Job(tmp_path, "one"), threading.Event(), threading.Event()

    def work(progress):
        progress(0.0, "first")
        began.set()
        may_end.wait(10)
        return {}

    first = threading.Thread(target=job.carry_out, args=({}, work))
    first.start()
    assert began.wait(10)
    other = Job(tmp_path, "one").carry_out({}, lambda progress: pytest.fail("done twice"))
    assert other["state"] == "running"
    may_end.set()
    first.join(10)
    assert job.read()["state"] == "done"


def test_the_job_of_a_worker_that_died_is_interrupted_and_can_be_done_again(tmp_path):
    code = f"""
        import os
        from pathlib import Path
        from controlplane.jobs import Job
        def work(progress):
            progress(0.3, "on the way")
            os._exit(9)
        Job(Path({str(tmp_path)!r}), "one").carry_out({{}}, work)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    job = Job(tmp_path, "one")
    assert job.read()["state"] == "interrupted"
    assert job.carry_out({}, lambda progress: {})["state"] == "done"


@pytest.mark.parametrize("name", ["", "../elsewhere", "a/b", "a.b"])
def test_an_id_that_could_lead_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="letters, digits"):
        Job(tmp_path, name)


def test_gentle_work_yields_to_the_rest_of_the_process_and_raises_what_it_raises():
    import os

    def work():
        return {"nice": os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert gently(work)["nice"] >= 10
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    with pytest.raises(KeyError):
        gently(lambda: {}["nothing"])
