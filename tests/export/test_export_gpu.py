"""Models on a CUDA device: exported from where they are, and left there. Skipped without one."""

import pytest
import torch

from featcal import export

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_the_gpu_is_exported_and_stays_there(net, dtype, tmp_path, runtime):
    model, images = net.model.to("cuda", dtype), net.images.to("cuda", dtype)
    state = torch.cuda.get_rng_state()
    done = export.onnx(model, tmp_path / "m.onnx", images[:3], rows=images)
    assert done.widened == ("" if dtype == torch.float32 else "bfloat16")
    assert all(weight.is_cuda for weight in model.parameters())
    assert model.training
    with torch.no_grad():
        expected = model.eval()(images).cpu()
    found = runtime(tmp_path / "m.onnx", x=images.cpu().float())["logits"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 if done.widened == "" else 0.05)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_program_runs_where_the_model_is(net):
    model, images = net.model.cuda(), net.images.cuda()
    program = export.program(model, images[:2]).module()
    with torch.no_grad():
        torch.testing.assert_close(program(images), model.eval()(images), rtol=1e-4, atol=1e-4)
