from adaptive_spec.serving.progress import own_adapters_line, progress_line


def test_a_run_is_told_in_a_line() -> None:
    told = {
        "phase": "distil",
        "step": 3,
        "steps": 80,
        "loss": 1.23456,
        "held_out_agreement": 0.5,
        "held_out_acceptance_length": 1.777,
        "tokens_per_second": 812.4,
        "seconds_left": 65.2,
    }
    expected = "distil step 3 of 80 loss 1.235 held-out acceptance length 1.78 812 tokens/s 65 s left"
    assert progress_line(told) == expected
    assert progress_line({"phase": "load"}) == "load" and progress_line({}) == ""
    assert progress_line({"phase": "distil", "domain": "sql", "step": 1}) == "distil of sql step 1"


def test_whose_adapter_won_is_told_in_a_line() -> None:
    def contender(name: str, gain_share: float) -> dict[str, object]:
        return {"name": name, "gain_share": gain_share}

    verdicts = [
        {"domain": "code", "winner": "new", "contenders": [contender("live", 0.09), contender("new", 0.0412)]},
        {"domain": "law", "winner": "shared", "contenders": [contender("new", -0.003)]},
        {"domain": "sql", "winner": "live", "contenders": []},
    ]
    assert own_adapters_line(verdicts) == "code: new (new +4.1%), law: shared (new -0.3%), sql: live"
    assert own_adapters_line([]) == ""
