"""On a CUDA device: every loss in a captured graph, forward and backward, equals eager."""

import pytest
import torch

from featcal.losses import LOSSES, AdaFocal, mixed, parse_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMS = [
    *sorted(LOSSES),
    "flsd(closed_form=True)",
    "mmce(variant='weighted', form='published')",
    "mmce(variant='weighted')",
    "soft_ece(norm=1)",
]


def made(seed, dtype=torch.float32, n=128, k=10):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=draw) * 3
    labels = torch.randint(0, k, (n,), generator=draw)
    labels[::2] = logits[::2].argmax(1)
    return logits.to("cuda", dtype), labels.cuda()


def slope(call, logits):
    leaf = logits.clone().requires_grad_()
    value = call(leaf)
    value.backward()
    return value.detach().clone(), leaf.grad


def captured(call, logits):
    """A function that replays the captured forward and backward pass on new logits."""
    leaf = logits.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            leaf.grad = None
            call(leaf).backward()
    torch.cuda.current_stream().wait_stream(stream)
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = call(leaf)
        value.backward()

    def replay(new):
        with torch.no_grad():
            leaf.copy_(new)
        graph.replay()
        return value.detach().clone(), leaf.grad.clone()

    return replay


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_captured_graph_equals_eager(text, dtype):
    """With logits, labels and a weight of mixing that change from replay to replay."""
    loss, weight = parse_loss(text).to("cuda"), torch.tensor(1.0, device="cuda")
    (first, labels), (second, others) = made(0, dtype), made(1, dtype)
    targets = labels.clone()
    replay = captured(lambda z: mixed(loss, z, targets, targets.roll(1), weight), first)
    for logits, new, share in ((first, labels, 1.0), (second, others, 0.3)):
        targets.copy_(new)
        weight.fill_(share)
        want, want_slope = slope(lambda z, y=new, w=share: mixed(loss, z, y, y.roll(1), w), logits)
        value, grad = replay(logits)
        torch.testing.assert_close(value, want)
        torch.testing.assert_close(grad, want_slope)


@pytest.mark.parametrize("text", FORMS)
def test_the_device_gives_what_the_cpu_gives(text):
    logits, labels = made(2)
    loss = parse_loss(text)
    here, here_slope = slope(lambda z: loss(z, labels.cpu()), logits.cpu())
    there, there_slope = slope(lambda z: loss.to("cuda")(z, labels), logits)
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(there_slope.cpu(), here_slope, rtol=1e-3, atol=1e-6)


def test_a_captured_adafocal_follows_state_copied_into_it():
    loss = AdaFocal().to("cuda")
    logits, labels = made(4)
    replay = captured(lambda z: loss(z, labels), logits)
    before = replay(logits)[0]
    moved = loss.updated(*made(5, n=400))
    for key, value in moved.state().items():
        loss.state()[key].copy_(value)
    after = replay(logits)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, moved(logits, labels))
