import dataclasses

import pytest

from ablations import claims

HIGH, LOW = [0.99, 0.98, 1.0, 0.99, 1.0, 0.97], [0.7, 0.6, 0.65, 0.72, 0.68, 0.61]


def verdicts(rows):
    return {(f.arm, f.against, f.field): f.verdict for f in claims.findings(rows)}


def test_only_arms_that_differ_in_one_field_are_contrasted(make_rows):
    rows = make_rows(
        {
            ("xor", "GDN"): ({"n_refine": 0}, LOW),
            ("xor", "GDN + conv"): ({"n_refine": 0, "short_conv": 4}, HIGH),
            ("xor", "PRISM"): ({}, HIGH),
            ("xor", "no GELU"): ({"activation": "identity"}, HIGH),
        }
    )
    found = {(c.field, c.arm, c.against) for c in claims.contrasts(rows)}
    assert found == {
        ("short_conv", "GDN + conv", "GDN"),
        ("n_refine", "PRISM", "GDN"),
        ("activation", "PRISM", "no GELU"),
    }


def test_arms_trained_differently_are_not_contrasted(make_rows):
    cells = {("xor", "GDN"): ({"n_refine": 0}, LOW), ("xor", "PRISM"): ({}, HIGH)}
    assert len(claims.contrasts(make_rows(cells, train={"GDN": {"learning_rate": 0.1}}))) == 1
    assert claims.contrasts(make_rows(cells, train={"GDN": {"steps": 9}})) == []


def test_a_credit_for_refinement_comes_with_the_arms_that_do_without(make_rows):
    rows = make_rows(
        {
            ("xor", "GDN"): ({"n_refine": 0}, LOW),
            ("xor", "GDN + conv"): ({"n_refine": 0, "short_conv": 4}, HIGH),
            ("xor", "PRISM"): ({}, HIGH),
        }
    )
    assert verdicts(rows) == {
        ("GDN + conv", "GDN", "short_conv"): "raises",
        ("PRISM", "GDN", "n_refine"): "raises",
        ("PRISM", "GDN + conv", ""): "alike",
    }
    rival = next(f for f in claims.findings(rows) if f.field == "")
    assert "not evidence for the rank of the write" in rival.text
    assert "1,200 parameters" in rival.text
    assert "1,000 parameters" in rival.text


def test_wording_follows_the_numbers(make_rows):
    def one(first, second):
        rows = make_rows(
            {("xor", "PRISM"): ({}, first), ("xor", "no GELU"): ({"activation": "identity"}, second)}
        )
        (found,) = claims.findings(rows)
        return found.verdict, found.text

    assert one(HIGH, LOW)[0] == "raises"
    assert one(LOW, HIGH)[0] == "lowers"
    assert one([1.0] * 6, [0.995] * 6)[0] == "alike"
    verdict, text = one([1.0] * 4, [0.995] * 4)  # nor can two or four seeds that agree carry an "alike"
    assert verdict == "open"
    assert "within 2% of each other, too few seeds to call them alike" in text
    verdict, text = one(HIGH[:5], LOW[:5])  # five pairs cannot carry a claim at 5%
    assert verdict == "open"
    assert "higher in 5 of 5 seeds, too few to tell from chance" in text
    verdict, text = one([1.0, 0.5, 1.0, 0.5, 1.0, 0.5], [0.5, 1.0, 0.5, 1.0, 1.0, 1.0])
    assert verdict == "open"
    assert "not told apart" in text
    verdict, text = one([1.0], [0.5])
    assert verdict == "none"
    assert "one seed has no interval: no verdict" in text
    verdict, text = one([1.0, None, 1.0], [0.5, 0.5, 0.5])
    assert verdict == "none"
    assert "1 of 3 pairs of PRISM and no GELU failed" in text


def test_a_difference_of_any_sure_sign_inside_the_margin_is_alike(make_rows):
    rows = make_rows(
        {("xor", "PRISM"): ({}, [0.999] * 6), ("xor", "no GELU"): ({"activation": "identity"}, [0.99] * 6)}
    )
    (found,) = claims.findings(rows)
    assert found.verdict == "alike"
    assert found.difference.low > 0
    assert "alike, at the ceiling, where little could show" in found.text
    rows["test_accuracy"] -= 0.2
    (below,) = claims.findings(rows)
    assert "identity): alike (PRISM 0.799" in below.text
    assert (found.at_ceiling, below.at_ceiling) == (True, False)
    raised = dataclasses.replace(below, verdict="raises")
    assert claims.headline([raised, found, below]) == [
        "Raises accuracy: the activation phi.",
        "Alike with and without, within 2% of the way from chance to ceiling: the activation phi.",
        "Alike, at the ceiling, where little could show: the activation phi.",
    ]


def test_seeds_are_paired_by_number(make_rows):
    rows = make_rows({("xor", "PRISM"): ({}, HIGH), ("xor", "no GELU"): ({"activation": "identity"}, LOW)})
    rows.loc[rows["arm"] == "no GELU", "seed"] += 3
    (found,) = claims.findings(rows)
    assert found.difference.n == 3
    rows.loc[rows["arm"] == "no GELU", "seed"] += 30
    (found,) = claims.findings(rows)
    assert found.verdict == "none"


def test_headline_says_what_the_findings_come_to(make_rows):
    rows = make_rows(
        {
            ("xor", "PRISM"): ({}, [1.0] * 6),
            ("xor", "no GELU"): ({"activation": "identity"}, [1.0] * 6),
            ("parity", "GDN"): ({"n_refine": 0}, LOW),
            ("parity", "GDN + conv"): ({"n_refine": 0, "short_conv": 4}, HIGH),
            ("parity", "PRISM"): ({}, HIGH),
            ("parity", "no GELU"): ({"activation": "identity"}, HIGH[:3] + LOW[:3]),
        }
    )
    found = claims.sections(rows)
    assert found["xor"][0] == (
        "All arms that differ in one ingredient alone are alike, at the ceiling, where little could show."
    )
    assert len(found["xor"]) == 2
    assert found["parity"][:2] == [
        "Raises accuracy: the short convolution on q, k, v; the refinement as a whole: writes, anchor and "
        "its convolution (but without it GDN + conv gets as far).",
        "Not told apart: the activation phi.",
    ]
    assert claims.multiplicity(claims.findings(rows)).startswith("5 comparisons, each at 5%")


def test_direction_is_towards_the_arm_that_has_the_ingredient(make_rows):
    rows = make_rows({("xor", "no GELU"): ({"activation": "identity"}, LOW), ("xor", "PRISM"): ({}, HIGH)})
    (contrast,) = claims.contrasts(rows)
    assert (contrast.arm, contrast.against) == ("PRISM", "no GELU")
    assert contrast.ingredient == "the activation phi (activation: gelu against identity)"


def test_an_anchor_is_credited_only_against_none(make_rows):
    rows = make_rows(
        {
            ("xor", "none"): ({"anchor": "none"}, LOW),
            ("xor", "token"): ({"anchor": "token"}, LOW),
            ("xor", "PRISM"): ({"anchor": "shortconv"}, HIGH),
        }
    )
    assert {(c.arm, c.against): c.name for c in claims.contrasts(rows)} == {
        ("PRISM", "token"): "the anchor's convolution",
        ("PRISM", "none"): "the anchor",
        ("token", "none"): "the anchor",
    }


def test_selection_rows_are_no_evidence(make_rows):
    rows = make_rows({("xor", "PRISM"): ({}, HIGH), ("xor", "no GELU"): ({"activation": "identity"}, LOW)})
    rows["role"] = "selection"
    assert claims.findings(rows) == []


def test_two_configurations_under_one_name_are_refused(make_rows):
    rows = make_rows({("xor", "PRISM"): ({}, HIGH)})
    rows.loc[0, "model"] = rows.loc[0, "model"].replace("gelu", "tanh")
    with pytest.raises(ValueError, match="one configuration of arm 'PRISM'"):
        claims.contrasts(rows)
