"""What is wrong with options, in words."""

from __future__ import annotations

from gpushare_spawner.wording import spawn_form as words


def test_a_long_value_is_shown_cut_short() -> None:
    assert words.shown("abc") == "'abc'"
    assert len(words.shown("x" * 500)) == words.LONGEST_SHOWN
    assert words.shown("x" * 500).endswith("...")


def test_a_user_who_may_use_no_template_is_told_none() -> None:
    assert words.unknown_template("big", []) == "There is no template 'big'. You may use: none."
    assert words.not_allowed("big", ["cpu", "small"]).endswith("You may use: cpu, small.")


def test_a_limit_of_one_server_is_said_in_the_singular() -> None:
    assert words.limit_reached(1, "1 GPU").startswith("You may run one server with 1 GPU at a time.")
    assert words.limit_reached(2, "1 GPU").startswith("You may run 2 servers with 1 GPU at a time.")


def test_an_option_without_choices_points_to_the_form() -> None:
    assert words.unknown_choice("Pages, Page", 3, {}) == (
        "Pages, Page: there is no choice 3; choose one of those on the form."
    )
