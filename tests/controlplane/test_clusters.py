"""The description of a run: whatever is wrong in it is refused by the name of its field, before anything is written."""

import copy

import pytest
import yaml
from django.core.management import CommandError, call_command

from apps.topology.models import Partition
from controlplane import clusters

GOOD = yaml.safe_load(clusters.DEFAULT_FILE.read_text())
WRONG = [None, -1, 1.5, "", "two words", [], {}, True, 10**20, float("nan"), float("inf")]


def places(node, at=()):
    """The path to everything in the description; of lists, the first item."""
    inner = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(place, value):
    document = copy.deepcopy(GOOD)
    at = document
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return document


@pytest.fixture
def read(tmp_path):
    """Reads a description; the error's words, empty when there is none."""

    def read(document):
        file = tmp_path / "clusters.yaml"
        file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        try:
            clusters.load(file)
        except clusters.ClustersError as error:
            return str(error)
        return ""

    return read


def test_the_default_run_is_read():
    assert [cluster.name for cluster in clusters.load().clusters] == ["laptop", "gb300"]


def test_no_value_anywhere_breaks_the_reader(read):
    # YAML anchors are gone after the first load, so every place can be changed alone.
    for place in places(GOOD):
        for value in WRONG[::3] if len(place) > 4 else WRONG:
            told = read(changed(place, value))
            assert told == "" or told.startswith("clusters.yaml: "), (place, value)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("clusters",), 3, "$.clusters"),
        (("clusters", 0, "name"), "two words", "$.clusters[0].name"),
        (("clusters", 1, "name"), "laptop", "clusters: 'laptop' is there twice"),
        (("clusters", 0, "gateway_port"), 70000, "$.clusters[0].gateway_port"),
        (("clusters", 0, "engine"), "magic", "$.clusters[0].engine"),
        (("clusters", 0, "hardware"), "abacus", "clusters.laptop.hardware is 'abacus'; expected one of"),
        (("clusters", 0, "nodes"), {}, "$.clusters[0].nodes"),
        (("clusters", 0, "nodes"), {"gb300-1": "decode"}, "nodes: 'gb300-1' is there twice"),
        (("clusters", 0, "nodes", "laptop-1"), "asleep", "$.clusters[0].nodes"),
        (("clusters", 0, "speed"), 0, "$.clusters[0].speed"),
        (("clusters", 0, "network"), {}, "clusters.laptop.network.peer_bandwidth_bytes_s is missing"),
        (("clusters", 0, "network", "latency_s"), float("nan"), "$.clusters[0].network.latency_s"),
        (("clusters", 0, "limits", "surprise"), 1, "surprise"),
        (("clusters", 0, "model", "block_tokens"), 0, "$.clusters[0].model.block_tokens"),
        (("clusters", 0, "planner", "mode"), "wild", "$.clusters[0].planner.mode"),
        (("clusters", 0, "planner", "surprise"), 1, "$.clusters[0].planner"),
        (("clusters", 1, "replay", "objective_shares"), {"nope": 1}, "clusters.gb300.replay.objective_shares"),
        (("bands", 0, "priority"), "high", "$.bands[0].priority"),
        (("clusters", 0, "bands"), [], "clusters.laptop.objectives.premium.band is 'premium'; expected one of none"),
        (("tenants", 0), {}, "$.tenants[0]"),
        (("tenants", 0, "title"), None, "$.tenants[0].title"),
        (("keys", 0, "tenant"), "nobody", "keys.demo.tenant is 'nobody'; expected one of demo, replay"),
        (("keys", 0, "objectives"), 3, "$.keys[0].objectives"),
        (("hardware", "gb300x4_tp4_glm52"), {"c0": 1.0}, "hardware.gb300x4_tp4_glm52.c1 is missing"),
        (("hardware", "gb300x4_tp4_glm52", "c9"), 1.0, "hardware.gb300x4_tp4_glm52 is 'c9'; expected one of c0"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(read, place, value, says):
    assert says in read(changed(place, value))


@pytest.mark.parametrize(
    "text", ["", "{", "- 1", "\x00", "&a [*a]", "clusters: &a {x: *a}", "when: 2001-99-99", "? {}"]
)
def test_what_is_no_description_at_all_is_refused(read, text):
    assert read(text).startswith("clusters.yaml: ")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("clusters", 0, "bands", 1, "priority"), 100, "clusters.laptop.bands.standard: band premium has priority 100"),
        (("clusters", 0, "bands", 0, "fairness"), "none", "clusters.laptop.bands.premium: fairness"),
        (("clusters", 0, "bands", 0, "ttl_s"), 1e9, "clusters.laptop.bands.premium: ttl_s"),
        (("clusters", 0, "objectives", 0, "ttl_s"), 1e9, "clusters.laptop.objectives.premium: ttl_s"),
        (("clusters", 0, "limits", "prefill_limit_per_node"), 10**9, "clusters.laptop.limits: prefill"),
        (("clusters", 0, "limits", "max_decode_batch"), 10**9, "clusters.laptop.nodes.laptop-1: decode_limit"),
        (("clusters", 0, "planner", "slice_s"), 1, "clusters.laptop.planner: slice_s"),
        (("clusters", 0, "planner", "slices_per_window"), 10**20, "clusters.laptop.planner: slices_per_window"),
        (("clusters", 0, "agent_host"), "two words", "clusters.laptop.nodes.laptop-1: url"),
        (("clusters", 0, "title"), "a\x00b", "clusters.laptop: title"),
        (("tenants", 0, "default_objective"), "nope", "tenants.demo: default_objective"),
        (("keys", 0, "role"), "king", "keys.demo: role"),
        (("keys", 0, "objectives"), ["nope"], "keys.demo: objectives"),
    ],
)
def test_what_the_tables_refuse_is_told_with_its_place_and_nothing_is_written(
    tmp_path, monkeypatch, place, value, says
):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    file = tmp_path / "clusters.yaml"
    file.write_text(yaml.safe_dump(changed(place, value)))
    with pytest.raises(CommandError) as refused:
        call_command("bootstrap", "--clusters", str(file))
    assert says in str(refused.value)
    assert not Partition.objects.exists()
