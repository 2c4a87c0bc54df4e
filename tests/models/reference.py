"""Table 1 and its ablations once more, as slowly and plainly as possible: one token, one head, one neuron at a time.

It shares no code with the package. Parameters come by their names in the model's state dict.
"""

import math
from functools import partial

import torch


def length(x):
    return torch.sqrt(sum(x[i] * x[i] for i in range(len(x))))


def norm(x):
    return x / length(x)


def rms(x):
    return x / torch.sqrt(sum(x[i] * x[i] for i in range(len(x))) / len(x))


def silu(z):
    return z / (1 + torch.exp(-z))


def matvec(w, x):
    return torch.stack([torch.dot(w[i], x) for i in range(len(w))])


def rotate(x, position, rotary_dim, base):
    """Rotate the plane (i, i + r/2) by position · base^(−2i/r)."""
    out = [x[i] for i in range(len(x))]
    half = rotary_dim // 2
    for i in range(half):
        angle = position * base ** (-2 * i / rotary_dim)
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i] * s + x[i + half] * c
    return torch.stack(out)


def attention(q, k, v, scale):
    """q, k, v: lists over positions of vectors of one head. Causal."""
    out = []
    for t in range(len(q)):
        scores = [torch.dot(q[t], k[s]) * scale for s in range(t + 1)]
        top = max(float(s.detach()) for s in scores)
        weights = [torch.exp(s - top) for s in scores]
        out.append(sum(w * v[s] for s, w in enumerate(weights)) / sum(weights))
    return out


def multi_head(h, w_qkv, cfg, prepare_q, prepare_k, scale, nu_qkv=1.0):
    """Attention of all heads over the inputs h (a list over positions), before the output map."""
    d, dh = cfg.d_model, cfg.d_head
    qkv = [matvec(w_qkv, x) * nu_qkv for x in h]
    columns = []
    for head in range(cfg.n_heads):
        part = slice(head * dh, (head + 1) * dh)
        q = [prepare_q(rotate(x[:d][part], t, cfg.rotary_dim, cfg.rotary_base), part) for t, x in enumerate(qkv)]
        k = [prepare_k(rotate(x[d : 2 * d][part], t, cfg.rotary_dim, cfg.rotary_base), part) for t, x in enumerate(qkv)]
        v = [x[2 * d :][part] for x in qkv]
        columns.append(attention(q, k, v, scale))
    return [torch.cat([columns[head][t] for head in range(cfg.n_heads)]) for t in range(len(h))]


def layers(p, cfg):
    """The parameters of each layer by their names in the block, with the layer's number from 1."""
    for layer in range(cfg.n_layers):
        start = f"blocks.{layer}."
        yield layer + 1, {name.removeprefix(start): w for name, w in p.items() if name.startswith(start)}


def gptplus(p, cfg, tokens, *, qk_norm=True, ln_scaling=False, dyt=False):
    def normed(x, weights, name, layer=1):
        if dyt:
            return torch.tanh(weights[f"{name}.a"][0] * x) * weights[f"{name}.gamma"]
        return rms(x) * weights[f"{name}.gamma"] / (math.sqrt(layer) if ln_scaling else 1)

    h = [p["W_e.weight"][t] * (p["embed_scale.stored"][0] if dyt else 1) for t in tokens]
    for layer, b in layers(p, cfg):
        x = [normed(a, b, "norm_a", layer) for a in h]

        def prepare(y, _):
            return norm(y) if qk_norm else y

        g = b["g.stored"][0] if qk_norm else 1 / math.sqrt(cfg.d_head)
        av = multi_head(x, b["W_qkv.weight"], cfg, prepare, prepare, g)
        h = [a + matvec(b["W_p.weight"], c) for a, c in zip(h, av, strict=True)]
        for t in range(len(h)):
            uz = matvec(b["W_uz.weight"], normed(h[t], b, "norm_m", layer))
            u, z = uz[: cfg.d_mlp], uz[cfg.d_mlp :]
            h[t] = h[t] + matvec(b["W_d.weight"], u * silu(z))
    return torch.stack([matvec(p["W_h.weight"], normed(a, p, "norm_h")) for a in h])


def nu_of(alpha):
    return 1 / torch.sqrt(alpha * alpha + (1 - alpha) * (1 - alpha))


def ngpt(p, cfg, tokens, *, lerp_factor=False):
    root = math.sqrt(cfg.d_model)

    def update(h, x, alpha):
        y = h + alpha * (x - h)
        return y * nu_of(alpha) if lerp_factor else norm(y)

    h = [p["W_e.weight"][t] for t in tokens]
    for _, b in layers(p, cfg):
        # Stored at 1/sqrt(d_m), starting at 1: s = sqrt(d_m) · stored. α starts at 0.05.
        s_qk = b["s_qk.stored"] * root
        alpha_a = torch.abs(b["alpha_a.stored"] * 0.05 * root)
        alpha_m = torch.abs(b["alpha_m.stored"] * 0.05 * root)
        s_u, s_z = b["s_uz.stored"][: cfg.d_mlp], b["s_uz.stored"][cfg.d_mlp :]

        def gained(x, part, s_qk=s_qk):
            return norm(x) * s_qk[part]

        av = multi_head(h, b["W_qkv.weight"], cfg, gained, gained, math.sqrt(cfg.d_head))
        for t in range(len(h)):
            h[t] = update(h[t], norm(matvec(b["W_p.weight"], av[t])), alpha_a)
            uz = matvec(b["W_uz.weight"], h[t])
            u, z = uz[: cfg.d_mlp] * s_u, uz[cfg.d_mlp :] * s_z * root
            h[t] = update(h[t], norm(matvec(b["W_d.weight"], u * silu(z))), alpha_m)
    return torch.stack([p["s_z.stored"] * root * matvec(p["W_h.weight"], a) for a in h])


def angpt(
    p, cfg, tokens, *, const=1.0, residual=1.0, constants=True, of_alpha=True, lerp=True, rows=False, normed=True,
    scaled_stream=False,
):  # fmt: skip
    nu_qkv, nu_p = const * math.sqrt(cfg.d_model / cfg.d_head), const * math.sqrt(cfg.d_head / cfg.d_model)
    nu_uz, nu_acf, nu_d = const * math.sqrt(1 / 4), const * 3.74, const * math.sqrt(4)
    if not constants:
        nu_qkv = nu_p = nu_uz = nu_acf = nu_d = 1.0

    def update(h, x, stored):
        if not lerp:
            return (h + x) * residual
        alpha = stored * 5  # stored at 0.01, starting at 0.05
        return (h + alpha * (x - h)) * (nu_of(alpha) if of_alpha else 1) * residual

    def after(x):
        return norm(x) if normed else x

    h = [p["W_e.weight"][t] for t in tokens]
    for _, b in layers(p, cfg):
        g = b["g.stored"][0]
        av = multi_head(h, b["W_qkv.weight"], cfg, lambda q, _: norm(q), lambda k, _: norm(k), g, nu_qkv)
        if rows:
            av = [x * math.sqrt(t + 1) for t, x in enumerate(av)]
        for t in range(len(h)):
            h[t] = update(h[t], after(matvec(b["W_p.weight"], av[t]) * nu_p), b.get("alpha_a.stored"))
            uz = matvec(b["W_uz.weight"], h[t]) * nu_uz
            u, z = uz[: cfg.d_mlp], uz[cfg.d_mlp :]
            h_m = after(matvec(b["W_d.weight"], u * silu(z) * nu_acf) * nu_d)
            h[t] = update(h[t], h_m, b.get("alpha_m.stored"))
    if scaled_stream:
        return torch.stack([matvec(p["W_h.weight"], p["s_h.stored"] * 100 * a) for a in h])
    return torch.stack([p["s_z.stored"] * 100 * matvec(p["W_h.weight"], a) for a in h])


MODELS = {
    "gpt+": gptplus,
    "gpt+/no-qk-norm": partial(gptplus, qk_norm=False),
    "gpt+/ln-scaling": partial(gptplus, ln_scaling=True),
    "gpt+/dyt": partial(gptplus, dyt=True),
    "ngpt": ngpt,
    "ngpt/lerp-factor": partial(ngpt, lerp_factor=True),
    "ngpt/bounded": partial(ngpt, lerp_factor=True),
    "angpt": angpt,
    "angpt/const-x0.5": partial(angpt, const=0.5),
    "angpt/const-x2": partial(angpt, const=2.0),
    "angpt/all-x0.5": partial(angpt, const=0.5, residual=0.5),
    "angpt/all-x2": partial(angpt, const=2.0, residual=2.0),
    "angpt/no-const": partial(angpt, constants=False),
    "angpt/no-residual-factor": partial(angpt, of_alpha=False),
    "angpt/no-factors": partial(angpt, constants=False, of_alpha=False),
    "angpt/no-lerp": partial(angpt, lerp=False),
    "angpt/no-lerp-with-factor": partial(angpt, lerp=False, residual=1 / math.sqrt(2)),
    "angpt/no-output-norm": partial(angpt, normed=False),
    "angpt/no-output-norm-no-const": partial(angpt, normed=False, constants=False),
    "angpt/scale-before-head": partial(angpt, scaled_stream=True),
    "angpt/attention-factor": partial(angpt, rows=True),
}
