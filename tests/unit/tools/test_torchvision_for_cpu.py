"""torchvision beside a torch for the CPU: only what names missing kernels is taken out."""

from __future__ import annotations

from tools.torchvision_for_cpu import without_registrations

SOURCE = """
@register_meta("roi_align")
def meta_roi_align(input):
    return input


@torch.library.register_fake("torchvision::nms")
def meta_nms(dets):
    return dets
"""


def test_registrations_of_missing_kernels_are_taken_out_and_repeating_it_is_harmless() -> None:
    left = without_registrations(SOURCE)
    assert "register_fake" not in left
    assert left.count("def ") == 2
    assert '@register_meta("roi_align")' in left
    assert without_registrations(left) == left
