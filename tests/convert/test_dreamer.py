"""Dreamer students: the teacher while routing is forced, experts by definition once it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.decoding import Decoder
from ltconvert.convert.students.dreamer import grouped
from ltconvert.convert.students.dreamer.build import pool_tensors
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.depth import depth_angles
from ltconvert.convert.students.dreamer.router import Router, start_logits
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.permute import permute, unpermute


def dreamer_options(layers: int = 3, slices: int = 1, **options: Any) -> dict[str, Any]:
    """A DreamerConfig as saved; by default twice as many experts as one MLP has slices."""
    return {
        "entries": layers,
        "experts": layers * slices,
        "slices": slices,
        "top_experts": 2 * slices,
        "shared_size": 16,
        **options,
    }


def dreamer_of(teacher: LT2ForCausalLM, **options: Any) -> LT2ForCausalLM:
    """A Dreamer at its start."""
    layers = teacher.config.num_layers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {"dreamer": dreamer_options(layers, **options)}
        return build_student(teacher, ["full"] * layers, settings)


def random_dreamer(family: str, release: float, loops: int = 1, **options: Any) -> LT2ForCausalLM:
    """Random weights in fp64, new parts included."""
    layout = {"norm_layout": "outer"} if family == "outer" else {}
    spec = tiny_spec("llama" if layout else family, num_loops=loops, **layout)
    model = tiny_model(spec, dreamer=dreamer_options(**options)).double()
    model.model.dreamer.set_release(release)
    return model


@pytest.mark.parametrize("family", [*FAMILIES, "huginn"])
@pytest.mark.parametrize("slices", [1, 4])
def test_it_starts_as_its_teacher(family: str, slices: int) -> None:
    teacher, ids = tiny_model(tiny_spec(family)), tokens(2, 17)
    student = dreamer_of(teacher, slices=slices, stream_norm=True)
    with torch.no_grad():
        found = student(ids)
        torch.testing.assert_close(found.logits, teacher(ids).logits, atol=1e-4, rtol=0)
        assert found.routes == ()
        student.model.dreamer.set_release(1.0)
        assert (student(ids).logits - found.logits).abs().max() > 1e-2


def test_a_wider_student_of_a_half_precision_teacher_is_that_teacher() -> None:
    """Gains are multiplied in at the student's precision: products do not fit the teacher's."""
    teacher, ids = tiny_model(tiny_spec("gemma3")).bfloat16(), tokens(2, 9)
    settings = {"dreamer": dreamer_options()}
    student = build_student(teacher, ["full"] * 3, settings, dtype=torch.float32)
    with torch.no_grad():
        wanted = teacher.float()(ids).logits  # every value of bf16 is one of fp32
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, "huginn"])
def test_released_it_is_the_teacher_where_own_experts_are_chosen_alone(family: str) -> None:
    teacher, ids = tiny_model(tiny_spec(family)), tokens(2, 9)
    student = dreamer_of(teacher, slices=2, top_entries=1, top_experts=2, parallel=True)
    student.model.dreamer.set_release(1.0)
    with torch.no_grad():
        found = student(ids)
        torch.testing.assert_close(found.logits, teacher(ids).logits, atol=1e-4, rtol=0)
    entries, experts = zip(*found.routes, strict=True)
    layers = [step.layer for step in student.model.schedule]
    assert [route.chosen_NK.unique().tolist() for route in entries] == [[i] for i in layers]
    assert [route.chosen_NK.unique().tolist() for route in experts] == [
        [2 * i, 2 * i + 1] for i in layers
    ]


def test_the_share_that_is_released_is_known_wherever_it_was_written() -> None:
    layer = tiny_model(tiny_spec(), dreamer=dreamer_options()).model.dreamer
    for write, share in (
        (lambda: layer.set_release(0.25), 0.25),
        (lambda: layer.release.fill_(0.5), 0.5),
        (lambda: layer.load_state_dict({"release": torch.tensor(0.75)}, strict=False), 0.75),
        (lambda: layer.to(torch.bfloat16), 0.75),
    ):
        write()
        assert layer.released() == share
    with torch.inference_mode():
        made_here = tiny_model(tiny_spec(), dreamer=dreamer_options())
        assert made_here.model.dreamer.released() == pytest.approx(0.6)
        made_here(tokens(1, 3))


def test_a_tensor_without_a_place_is_refused() -> None:
    tensors = dict(tiny_model(tiny_spec(), sdpa_gate=True).named_parameters())
    with pytest.raises(ValueError, match=r"no place for layer 0's mixer\.gate_proj\.weight"):
        pool_tensors(tensors, slices=1, norm_offset=0.0)


def norm(x: Tensor, eps: float, gain: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def shares(
    router: Router, h: Tensor, depth: int, layer: int, release: float
) -> tuple[Tensor, Tensor]:
    """Weight of every expert, nulls left out, for one token, and the highest score chosen."""
    experts = len(router.balance)
    logits = router.keys @ h + router.depth_logits[depth]
    ranked = logits if router.select_by == "logits" else torch.sigmoid(logits)
    plain = sorted(range(len(logits)), key=lambda e: -float(ranked[e]))
    nulls = [e for e in plain[: router.top] if e >= experts]
    chosen = sorted(range(experts), key=lambda e: -float(ranked[e] + router.balance[e]))
    scores = torch.zeros_like(logits)
    for expert in nulls + chosen[: router.top - len(nulls)]:
        scores[expert] = torch.sigmoid(logits[expert])
    learned = (router.slices * scores / scores.sum())[:experts]
    own = torch.zeros_like(learned)
    own[layer * router.slices : (layer + 1) * router.slices] = 1.0
    return (1 - release) * own + release * learned, scores.max()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + D/2) of [..., D] turned by the first D/2 angles."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


class ByDefinition:
    """Logits of one row, token by token and expert by expert, from the formulas."""

    def __init__(self, model: LT2ForCausalLM, release: float) -> None:
        self.model, self.release = model, release
        self.inner, self.spec, self.layer = model.model, model.model.spec, model.model.dreamer
        self.eps, self.offset = self.spec.rms_norm_eps, self.spec.norm_offset
        self.depths = len(self.inner.schedule)
        self.left: list[tuple[Tensor, Tensor]] = []

    def logits(self, ids: Tensor) -> Tensor:
        inner, spec = self.inner, self.spec
        h = inner.embed(ids)[0]
        for step in inner.schedule:
            h = h + self.depth_attention(h, step.slot)
            h = self.after_attention(h, step.slot, step.layer)
            h = self.after_experts(h, step.slot, step.layer)
            if self.layer.normed_share is not None:
                h = h + self.layer.normed_share[step.slot] * (norm(h, self.eps) - h)
            if step.closes_loop and (spec.loop_norm == "every" or step is inner.schedule[-1]):
                h = inner.norm(h)
        return self.model.logits(h)

    def depth_attention(self, h: Tensor, depth: int) -> Tensor | float:
        part, D, left = self.layer.depth, self.spec.head_dim, self.left
        x = norm(h, self.eps, part.norm.weight + self.offset)
        count = D // 2 - D // 4
        angles = [depth * 0.01 ** (i / count) for i in range(count)]
        angles += [(self.depths - 1 - depth) * 0.01 ** (i / (D // 4)) for i in range(D // 4)]
        q, k, v = (
            (x @ projection.weight.mT).unflatten(-1, (-1, D))
            for projection in (part.q_proj, part.k_proj, part.v_proj)
        )
        q, k = (turned(y, torch.tensor(angles, dtype=y.dtype)) for y in (q, k))
        self.left = [*left, (k, v)]
        if not left:
            return 0.0
        keys, values = (torch.stack(parts, 1) for parts in zip(*left, strict=True))
        weights = (torch.einsum("thd,tnhd->thn", q, keys) * D**-0.5).softmax(-1)
        return torch.einsum("thn,tnhd->thd", weights, values).flatten(1) @ part.o_proj.weight.mT

    def branch_input(self, h: Tensor) -> Tensor:
        return h if self.spec.norm_layout == "post" else norm(h, self.eps)

    def joined(self, h: Tensor, y: Tensor, weights: Tensor, pool: Any) -> Tensor:
        if self.spec.norm_layout == "pre":
            return h + y
        weights = weights / pool.total
        gain = weights @ (pool.post_norm.weight + self.offset)
        if self.spec.norm_layout == "outer":
            return norm(h + y, self.eps, gain) + (1 - weights.sum()) * h
        return h + norm(y, self.eps, gain)

    def after_attention(self, h: Tensor, depth: int, layer: int) -> Tensor:
        pool, router = self.layer.attention, self.layer.attention_router
        mixes = [shares(router, norm(x, self.eps), depth, layer, self.release)[0] for x in h]
        tokens_qkv = [
            self.projected(self.branch_input(x), mix / mix.sum().clamp(min=1e-30), layer, t)
            for t, (x, mix) in enumerate(zip(h, mixes, strict=True))
        ]
        after = []
        for t, mix in enumerate(mixes):
            out = self.attended(tokens_qkv[: t + 1], self.spec.layer_windows[layer])
            y = sum(w * (pool.o.weight[e] @ out) for e, w in enumerate(mix))
            after.append(self.joined(h[t], y, mix, pool))
        return torch.stack(after)

    def projected(self, x: Tensor, mix: Tensor, layer: int, t: int) -> list[Tensor]:
        """q [H, D], k and v [G, D] of one token at its place."""
        spec, pool, D = self.spec, self.layer.attention, self.spec.head_dim
        y = sum(w * (pool.qkv.weight[e] @ x) for e, w in enumerate(mix))
        if pool.qkv.bias is not None:
            y = y + mix @ pool.qkv.bias
        H, G = spec.num_attention_heads, spec.num_key_value_heads
        q, k, v = (part.unflatten(0, (-1, D)) for part in y.split([H * D, G * D, G * D]))
        if spec.qk_norm:
            gains = [mix @ (part.weight + self.offset) for part in (pool.q_norm, pool.k_norm)]
            if spec.qk_norm == "full":
                q, k = q.flatten(), k.flatten()
            q, k = norm(q, self.eps, gains[0]), norm(k, self.eps, gains[1])
        q, k = q.view(H, D), k.view(G, D)
        if (name := spec.layer_rope[layer]) is not None:
            frequencies = self.inner._ropes[name].frequencies("cpu")[0].double()[: D // 2]
            q, k = turned(q, t * frequencies), turned(k, t * frequencies)
        return [q, k, v]

    def attended(self, seen: list[list[Tensor]], window: int | None) -> Tensor:
        """Outputs of all heads [H * D] of the last of the tokens seen."""
        spec, (query, _, _) = self.spec, seen[-1]
        seen = seen[-window:] if window is not None else seen
        group, out = spec.num_attention_heads // spec.num_key_value_heads, []
        for head, q in enumerate(query):
            scores = torch.stack([k[head // group] @ q for _, k, _ in seen]) * spec.attention_scale
            if (cap := spec.attention_softcap) is not None:
                scores = cap * torch.tanh(scores / cap)
            out.append(scores.softmax(-1) @ torch.stack([v[head // group] for _, _, v in seen]))
        return torch.cat(out)

    def after_experts(self, h: Tensor, depth: int, layer: int) -> Tensor:
        pool, router, after = self.layer.experts, self.layer.expert_router, []
        for token in h:
            x = norm(token, self.eps)
            mix, top = shares(router, x, depth, layer, self.release)
            y = torch.zeros_like(x)
            for e, weight in enumerate(mix):
                gate, up = (pool.gate_up.weight[e] @ self.branch_input(token)).chunk(2)
                y = y + weight * (pool.down.weight[e] @ (pool.activation(gate) * up))
            after.append(self.joined(token + top * self.layer.shared(x), y, mix, pool))
        return torch.stack(after)


@pytest.mark.parametrize(
    ("family", "loops", "release", "options"),
    [
        ("llama", 1, 0.0, {}),
        ("qwen2", 2, 1.0, {"slices": 2, "select_by": "scores"}),
        ("qwen3", 1, 0.4, {"slices": 2, "top_experts": 3}),
        ("smollm3", 1, 1.0, {"stream_norm": True}),
        ("olmo2", 1, 0.4, {"slices": 2}),
        ("gemma2", 2, 0.4, {"slices": 4, "top_experts": 7, "top_entries": 3}),
        ("gemma3", 1, 1.0, {"top_entries": 1, "top_experts": 1}),
        ("ouro", 3, 0.4, {}),
        ("outer", 1, 0.4, {"slices": 2}),
        ("outer", 1, 1.0, {"slices": 2, "null_entries": 1, "null_experts": 2}),
        ("qwen2", 1, 1.0, {"slices": 2, "null_entries": 1, "null_experts": 2}),
        ("gemma2", 1, 1.0, {"slices": 2, "null_entries": 1, "null_experts": 1}),
        ("gemma3", 1, 1.0, {"top_entries": 1, "null_entries": 1, "null_experts": 1}),
    ],
)
def test_it_is_what_its_formulas_say(
    family: str, loops: int, release: float, options: dict[str, Any]
) -> None:
    model = random_dreamer(family, release, loops, **options)
    generator = torch.Generator().manual_seed(3)
    for router in (model.model.dreamer.attention_router, model.model.dreamer.expert_router):
        router.balance.normal_(generator=generator)
    with torch.no_grad():
        wanted = ByDefinition(model, release).logits(tokens(1, 9))
        torch.testing.assert_close(model(tokens(1, 9)).logits[0], wanted, atol=1e-5, rtol=1e-5)


def test_everything_learns_while_routing_is_released() -> None:
    teacher, ids = tiny_model(tiny_spec("qwen3")), tokens(2, 11)
    student = dreamer_of(teacher, stream_norm=True).double()
    student.model.dreamer.set_release(0.5)
    student(ids, labels=ids).loss.backward()
    idle = {n for n, p in student.named_parameters() if p.grad is None or not p.grad.any()}
    # The first factor of a product whose second one starts at 0 waits for that.
    waiting = {f"depth.{n}_proj.weight" for n in "qkv"} | {"depth.norm.weight"}
    waiting |= {"shared.gate_proj.weight", "shared.up_proj.weight"}
    assert idle == {f"model.dreamer.{name}" for name in waiting}


def grouped_products(
    values: dict[str, Tensor], chosen_NK: Tensor, *, by_sorting: bool
) -> dict[str, Tensor | None]:
    """Weighed sums of each token's experts, and all gradients."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    x_NI, weight_EOI, weights_NK = leaves.values()
    if by_sorting:
        grouping = grouped.group(chosen_NK, len(weight_EOI))
        y_MO = grouped.grouped_linear(permute(x_NI, grouping.place_NK), weight_EOI, grouping)
        y_NO = unpermute(y_MO, grouping.place_NK, weights_NK)
    else:
        y_NO = torch.einsum("nkoi,ni,nk->no", weight_EOI[chosen_NK], x_NI, weights_NK)
    y_NO.square().sum().backward()
    return {"y": y_NO.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def drawn(tokens_: int, choices: int, sizes: tuple[int, int, int]) -> tuple[Any, Tensor]:
    """Inputs of ``grouped_products`` in fp64; one expert stays idle, another comes twice."""
    generator = torch.Generator().manual_seed(0)
    experts, _, inputs = sizes
    values = {
        "x": torch.randn(tokens_, inputs, generator=generator, dtype=torch.double),
        "weight": torch.randn(sizes, generator=generator, dtype=torch.double) / inputs**0.5,
        "weights": torch.rand(tokens_, choices, generator=generator, dtype=torch.double),
    }
    order = [torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens_)]
    chosen_NK = torch.stack(order)
    chosen_NK[chosen_NK == 2] = 3
    return values, chosen_NK


def test_sorted_products_are_the_experts_own_with_their_gradients() -> None:
    values, chosen_NK = drawn(7, 2, (4, 3, 5))
    found, wanted = (grouped_products(values, chosen_NK, by_sorting=x) for x in (True, False))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 301, 4096])
def test_one_grouped_product_on_a_gpu_is_as_right_as_plain_ones(count: int) -> None:
    values, chosen_NK = drawn(count, 3, (8, 96, 64))
    truth = grouped_products(values, chosen_NK, by_sorting=False)
    half = {name: value.to("cuda", torch.bfloat16) for name, value in values.items()}
    assert grouped._has_kernel(half["weight"])
    plain, kernel = (
        {n: x.cpu() for n, x in grouped_products(half, chosen_NK.cuda(), by_sorting=by).items()}
        for by in (False, True)
    )
    check(judge(truth, plain, kernel, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "nulls"), [("full", 0), ("gdn", 0), ("full", 1)])
def test_a_step_on_a_gpu_is_that_of_a_cpu(kind: str, nulls: int) -> None:
    """Loss and gradients in bf16 beside those in fp64, grouped products and depth slots and all."""
    spec = tiny_spec("qwen3", hidden_size=64, intermediate_size=96, head_dim=16)
    sizes = {"null_entries": nulls, "null_experts": 2 * nulls}
    pools = dreamer_options(slices=2, top_experts=3, **sizes)
    model = tiny_model(spec, [kind] * 3, dreamer=pools).train()
    for router in (m for m in model.modules() if isinstance(m, Router)):
        # Far from ties: a token that chooses otherwise in half precision has other gradients.
        router.depth_logits.data += 2.0 * torch.arange(router.depth_logits.shape[1])
    ids, found = tokens(2, 33), []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = model.to(device, dtype)
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        gradients = {n: p.grad.cpu().double().clone() for n, p in model.named_parameters()}
        found.append({"loss": loss.detach().cpu().double(), **gradients})
    truth, half = found
    torch.testing.assert_close(half["loss"], truth["loss"], rtol=2e-2, atol=0)
    for name, value in truth.items():
        # On a CPU in bf16 the largest are 0.57 (rates, whose terms cancel), 0.09 and 0.08.
        limit = 0.8 if "rate" in name else 0.3 if "router" in name else 0.15
        assert (half[name] - value).norm() < limit * value.norm(), name


def test_a_depth_prefers_its_own_experts_and_then_near_ones() -> None:
    logits = start_logits([0, 1, 2, 0, 1, 2], experts=6, slices=2)
    assert logits[0] == [2.0, 2.0, -4.0, -4.0, -4.25, -4.25]
    assert logits[5] == [-4.25, -4.25, -4.0, -4.0, 2.0, 2.0]  # layer 0 two depths before
    assert start_logits([0, 1, 2], experts=3, slices=1)[0] == [2.0, -4.0, -4.25]


def test_the_balancing_bias_enters_the_choice_alone() -> None:
    router = Router(4, 5, [0, 1], slices=1, top=2, select_by="logits")
    h_NC = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = router(h_NC, 0)
    assert before.chosen_NK.tolist() == [[0, 1]] * 3
    router.balance[4] = 9.0
    after = router(h_NC, 0)
    assert after.chosen_NK.tolist() == [[4, 0]] * 3
    scores = torch.tensor([start_logits([0, 1], 5, 1)[0][e] for e in (4, 0)]).sigmoid()
    torch.testing.assert_close(after.weights_NK[0], scores / scores.sum())
    torch.testing.assert_close(after.top_N, before.top_N)


@pytest.mark.parametrize("select_by", ["logits", "scores"])
def test_balancing_is_among_experts_alone(select_by: Any) -> None:
    router = Router(4, 4, [0, 1], slices=1, top=3, select_by=select_by, nulls=2)
    h_NC = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    router.depth_logits.data[0] = torch.tensor([1.0, 0.5, 0.0, -1.0, 0.75, -2.0])
    assert router(h_NC, 0).chosen_NK.sort().values.tolist() == [[0, 1, 4]] * 3
    router.balance.copy_(torch.tensor([-9.0, -9.0, 9.0, 9.0]))
    found = router(h_NC, 0)
    assert found.chosen_NK.sort().values.tolist() == [[2, 3, 4]] * 3
    torch.testing.assert_close(found.top_N, torch.full((3,), 0.75).sigmoid())
    router.balance.fill_(-9.0)
    assert router(h_NC, 0).chosen_NK.sort().values.tolist() == [[0, 1, 4]] * 3


def test_half_of_the_frequencies_count_the_depths_that_are_left() -> None:
    first, last = depth_angles(0, 5, 12)[:6], depth_angles(4, 5, 12)[:6]
    assert first[:3] == [0.0] * 3 == last[3:]
    assert last[0] == first[3] == 4.0 > last[1] > last[2] > 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_entries": 4}, "student.top_entries is 4, the pool holds 3; choose 1 to 3"),
        ({"slices": 2, "experts": 6, "top_experts": 1}, "less than the 2 slices"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DreamerConfig(**{**dreamer_options(), **given})


def test_what_it_has_not_is_refused_in_one_line() -> None:
    model, ids = tiny_model(tiny_spec("ouro"), dreamer=dreamer_options()), tokens(1, 4)
    with pytest.raises(ValueError, match="a Dreamer runs all depths; leave it out"):
        model(ids, exit_threshold=0.5)
    with pytest.raises(ValueError, match="a Dreamer runs all depths; leave it out"):
        Decoder(model, 1, 8, exit_threshold=0.5)
