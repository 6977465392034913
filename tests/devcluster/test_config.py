import pytest

from slurm_pt.devcluster import DevClusterConfig
from slurm_pt.errors import DevClusterError


def test_every_node_has_a_loopback_address_of_its_own():
    config = DevClusterConfig(nodes=250)
    addresses = {config.node_address(name) for name in config.node_names}
    assert len(addresses) == 250
    assert all(address.startswith("127.0.") for address in addresses)
    assert config.node_address("n1") == "127.0.1.1"
    # 127.0.1.0 would be a network's own address; 250 is the last of the first block.
    assert config.node_address("n250") == "127.0.1.250"


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"nodes": 0}, "nodes=1"),
        ({"nodes": 251}, "nodes=250"),
        ({"grace_time_s": -1}, "grace_time_s=0"),
        ({"preempt_type": "priority"}, "preempt_type=qos"),
        ({"preempt_mode": "suspend"}, "preempt_mode=requeue"),
        ({"gpu_type": "A 100"}, "gpu_type=a100"),
        ({"accounts": ()}, "accounts=demo"),
        ({"extra_slurm_conf": "KillWait=9"}, "['KillWait=9']"),
    ],
)
def test_a_bad_option_is_refused_with_what_to_set_instead(options, fix):
    with pytest.raises(DevClusterError) as caught:
        DevClusterConfig(**options)
    assert next(iter(options)) in str(caught.value)
    assert f"To fix: {fix}" in str(caught.value)


def test_lists_are_taken_as_tuples_so_that_a_config_can_be_compared_and_hashed():
    config = DevClusterConfig(extra_slurm_conf=["KillWait=9"])
    assert config == DevClusterConfig(extra_slurm_conf=("KillWait=9",))
    assert hash(config) == hash(DevClusterConfig(extra_slurm_conf=("KillWait=9",)))
