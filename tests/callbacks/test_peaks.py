import pytest
import torch

from olmoe_lightning.callbacks.peaks import PEAKS, find_device_peak, matmul_kind, peak_flops


@pytest.mark.parametrize(
    ("name", "kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA B300 SXM6 AC", "fp8", 4500),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16", 503.8),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L40S", "bf16", 362),
    ],
)
def test_table_gives_the_dense_peak_of_the_name_the_driver_reports(name, kind, tflops):
    assert find_device_peak(name).tflops(kind) == tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of a card
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H2000",
        "NVIDIA A10G",
        "Tesla T4",
    ],
)
def test_unknown_devices_and_slices_get_no_peak(name):
    assert find_device_peak(name) is None


def test_mxfp8_counts_as_bf16_where_it_is_emulated():
    assert find_device_peak("NVIDIA H100 80GB HBM3").tflops("mxfp8") == 989.5
    assert find_device_peak("NVIDIA B200").tflops("mxfp8") == 4500


def test_formats_keep_the_hardware_ratio_so_no_sparse_number_stands_alone():
    # FP8 runs at twice the rate of BF16, and BF16 at twice that of TF32; a sparse entry would show as 4 or 1.
    for peak in PEAKS:
        if peak.fp8 is not None:
            assert peak.fp8 / peak.half == pytest.approx(2, rel=0.02)
        if peak.tf32 is not None:
            assert peak.half / peak.tf32 == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", "fp32"),
        ("64-true", "fp64"),
        ("16-mixed", "fp16"),
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("mxfp8", "mxfp8"),
        ("transformer-engine", "fp8"),
    ],
)
def test_matmul_kind_follows_the_trainers_precision(precision, kind):
    assert matmul_kind(precision, torch.device("cpu")) == kind


def test_fp32_means_tf32_on_cuda_when_torch_may_use_it():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert matmul_kind("32-true", torch.device("cuda")) == "tf32"
        assert matmul_kind("32-true", torch.device("cpu")) == "fp32"
        torch.set_float32_matmul_precision("highest")
        assert matmul_kind("32-true", torch.device("cuda")) == "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_cpu_peak_is_measured_once_and_draws_no_random_numbers(monkeypatch):
    state = torch.get_rng_state()
    first = peak_flops(torch.device("cpu"), "fp32")
    monkeypatch.delattr(torch, "mm")  # by which it is measured
    assert peak_flops(torch.device("cpu"), "fp32") == first
    assert 1e8 < first < 1e14
    assert torch.equal(torch.get_rng_state(), state)


def test_other_devices_have_no_peak():
    assert peak_flops(torch.device("meta"), "fp32") is None
