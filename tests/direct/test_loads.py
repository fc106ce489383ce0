import json

import pytest

from workers.direct.loads import BadLoad, from_loads, from_metrics

VLLM = b"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0
vllm:weird{x="a\\"}b"} NaN
"""


def test_vllms_metrics_say_its_load_over_all_ranks():
    load = from_metrics("vllm", VLLM)
    assert (load.running, load.waiting, load.kv_used_ratio, load.kv_tokens) == (7, 2, 0.5, 1600)


def test_an_older_name_of_the_cache_usage_is_understood():
    assert from_metrics("vllm", VLLM.replace(b"kv_cache_usage", b"gpu_cache_usage")).kv_used_ratio == 0.5


def test_sglangs_metrics_say_its_load():
    text = (
        b'sglang:num_running_reqs{model_name="m"} 1\nsglang:num_queue_reqs{model_name="m"} 5\nsglang:token_usage 0.1\n'
    )
    load = from_metrics("sglang", text)
    assert (load.running, load.waiting, load.kv_used_ratio) == (1, 5, 0.1)


def test_metrics_of_another_server_are_refused_by_what_is_missing():
    with pytest.raises(BadLoad, match="vllm:num_requests_running"):
        from_metrics("vllm", b"up 1\n")


def test_sglangs_loads_are_added_up_over_ranks():
    rank = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "token_usage": 0.3,
        "max_total_num_tokens": 1000,
        "max_running_requests": 8,
        "total_prefill_uncached_tokens": 500,
        "total_prefill_busy_us": 2_000_000,
    }
    load = from_loads(json.dumps({"loads": [rank, {**rank, "token_usage": 0.6}]}).encode())
    assert (load.running, load.waiting, load.kv_used_ratio, load.kv_tokens, load.max_running) == (4, 2, 0.6, 2000, 16)
    assert (load.prefill_uncached_tokens, load.prefill_busy_s) == (1000, 4.0)


def test_totals_that_an_engine_does_not_give_are_not_made_up():
    assert from_loads(b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0}]}').prefill_busy_s is None


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"loads":[1]}', b'{"loads":[{}]}', b'{"loads":{"a":1}}'])
def test_loads_of_another_form_are_refused(text):
    with pytest.raises(BadLoad):
        from_loads(text)
