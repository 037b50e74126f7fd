"""Candidates that are sound files and bad drafts: the gate refuses them, and nobody who is served notices."""

import urllib.error
from dataclasses import replace

import pytest

from adaptive_spec.core import Trace
from adaptive_spec.records.releases import list_releases, live_version
from adaptive_spec.records.screening import is_held_out
from adaptive_spec.records.trace_statistics import trace_statistics
from tests.faults.conftest import Place
from tests.faults.traces import honest_traces, poisoned
from tests.faults.traffic import Traffic
from tests.process import call, until

pytestmark = pytest.mark.faults
LEARNING = {
    "LEARNING__MAX_EPOCHS": 8,
    "LEARNING__LEARNING_RATE": 0.01,
    "LEARNING__RANK": 8,
    "LEARNING__BATCH_TOKENS": 256,
    "LEARNING__MAX_SLOWDOWN_SHARE": 1,  # clients never stop asking, and a run that yields to them would take for ever
}


def refusal(place: Place, traces: list[Trace]) -> str:
    """Train on these traces in a service under traffic; return why the candidate was refused."""
    place.store_traces(traces)
    with place.serving(**LEARNING) as process, Traffic(place.url, place.models.answers) as traffic:
        run_id = call(f"{place.url}/api/retrain", {})["run_id"]
        run = until(lambda: _ended(place, run_id), 240)
        assert run["state"] == "refused", run
        traffic.more()
        assert place.live() == 0 == live_version(place.database)
        (record,) = list_releases(place.database)
        assert record.state == "refused"  # its bundle stays, to be looked at
    traffic.check()
    assert process.returncode == 0
    place.check_records(traffic)
    return "; ".join(run["report"]["reasons"])


def _ended(place: Place, run_id: int) -> dict[str, object] | None:
    run = place.run(run_id)
    return run if run["state"] not in ("queued", "running") else None


def test_an_adapter_that_lowers_acceptance(place: Place) -> None:
    """Somebody has changed what there is to train on; the held-out requests are as they were."""
    traces = honest_traces(place.models.pair, 120, "a", seed=1)
    held_out = [trace for trace in traces if is_held_out(trace.tokens, trace.prompt_tokens, 0.2)]
    training = [trace for trace in traces if not is_held_out(trace.tokens, trace.prompt_tokens, 0.2)]
    assert "no gain is certain" in refusal(place, [*held_out, *poisoned(training)])


def test_a_poisoned_domain(place: Place) -> None:
    """A domain of which all is changed, held-out requests too: whatever it learns there is no gain over all."""
    pair = place.models.pair
    flood = poisoned(honest_traces(pair, 120, "flood", seed=2))
    assert refusal(place, [*honest_traces(pair, 60, "a", seed=1), *flood]).startswith(("goodput: ", "domains: "))


def test_answers_that_loop_teach_nothing(place: Place) -> None:
    """What would make a draft that is always right, and of no use: nothing of it is kept to learn from."""
    loops = [
        replace(trace, tokens=(*trace.tokens[: trace.prompt_tokens], *(7, 9) * 10))
        for trace in honest_traces(place.models.pair, 40, "a", seed=1)
    ]
    place.store_traces(loops)
    (row,) = trace_statistics(place.database)
    assert (row.num_traces, row.dropped["loop"]) == (0, 40)
    with place.serving(RECORDS__TRACE_SHARE=0), Traffic(place.url, place.models.answers) as traffic:
        with pytest.raises(urllib.error.HTTPError, match="409"):
            call(f"{place.url}/api/retrain", {})
        traffic.more()
        assert place.live() == 0 == live_version(place.database) and list_releases(place.database) == []
    traffic.check()
    place.check_records(traffic)
