"""YAML from people: what is small in text and huge in memory is refused before anything is built of it."""

import time

import pytest
import yaml

from controlplane import clusters, yaml_text


def laughs(levels=12, wide=9):
    lines = ["a0: &a0 [" + ", ".join(["lol"] * wide) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * wide) + "]" for n in range(1, levels)]
    return "\n".join(lines)


def deep_by_aliases(levels):
    return "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, levels))])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x 1\nb: *x", "line 1: expected every value written out, without anchors (&x)"),
        ("b: *x", "line 1: expected every value written out, without aliases (*x)"),
        (laughs(), "without anchors"),
        ("[" * 51 + "]" * 51, "at most 50 levels"),
        ("a:\n" + "".join(" " * n + "a:\n" for n in range(1, 60)), "line 51: expected at most 50 levels"),
        ("[" * 400_000, "nesting depth" if yaml.__with_libyaml__ else "at most 50 levels"),
        ("x" * 1_000_001, "at most 1,000,000 characters"),
        ("--- 1\n" * 2001, "at most 2,000 documents"),
        ("[" + "1," * 200_001 + "]", "at most 200,000 values"),
        ("a: 1:" + "59:" * 5000 + "1", "values of at most 10,000 characters"),
        ("a: 0x" + "f" * 9000, "whole numbers of at most 100 digits"),
        ("? 0x" + "f" * 9000 + "\n: 1", "whole numbers of at most 100 digits"),
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3", "line 5: 'c' is there twice"),
        ("? [1]\n: 2", "line 1: expected a name before the colon"),
        ("!!timestamp x", "without tags"),
        ("!!python/object/apply:os.getcwd []", "without tags"),
        ("a: [", "expected YAML at line"),
        ("a: 2001-99-99", "a date that does not exist"),
        ("\x00", "a character"),
    ],
)
def test_what_is_wrong_is_said_at_once_and_in_which_line(text, says):
    began = time.process_time()
    with pytest.raises(yaml_text.YamlTextError) as refused:
        yaml_text.load(text)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300
    assert time.process_time() - began < 2.0


def test_what_is_right_is_read_as_it_is_written():
    text = "a: 1\nb: [x, null, 2.5, true]\n---\n---\n- {c: {c: c}}\n- {c: 1}\n"
    assert yaml_text.load(text) == [{"a": 1, "b": ["x", None, 2.5, True]}, [{"c": {"c": "c"}}, {"c": 1}]]
    assert yaml_text.load("[" * 50 + "]" * 50)


def test_where_aliases_are_allowed_they_count_with_what_they_stand_for():
    assert yaml_text.load("a: &x [1, 2]\nb: *x", aliases=True) == [{"a": [1, 2], "b": [1, 2]}]
    for text, says in (
        (laughs(), "at most 200,000 values"),
        (deep_by_aliases(60), "at most 50 levels"),
        ("&a [*a]", "does not contain itself (*a)"),
        ("a: &a {b: {c: *a}}", "does not contain itself"),
        ("a: *b", "undefined alias"),
    ):
        with pytest.raises(yaml_text.YamlTextError) as refused:
            yaml_text.load(text, aliases=True)
        assert says in str(refused.value), text
    assert yaml_text.load(deep_by_aliases(45), aliases=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [(laughs(), "at most 200,000 values"), (deep_by_aliases(60), "at most 50 levels"), ("a: 1\n---\nb: 1", "one YAML")],
)
def test_a_description_of_clusters_is_read_the_same_way(tmp_path, text, says):
    file = tmp_path / "clusters.yaml"
    file.write_text(text)
    with pytest.raises(clusters.ClustersError, match=says):
        clusters.load(file)


def test_what_the_product_writes_is_read():
    document = yaml.safe_load(clusters.DEFAULT_FILE.read_text())
    assert yaml_text.load(yaml.safe_dump(document), aliases=True) == [document]
