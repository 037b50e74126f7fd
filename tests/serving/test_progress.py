from adaptive_spec.serving.progress import progress_line


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
