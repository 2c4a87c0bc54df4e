"""Table 1 once more, as slowly and plainly as possible: one token, one head, one neuron at a time.

It shares no code with the package. Parameters come by their names in the model's state dict.
"""

import math

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
    return torch.stack([sum(w[i, j] * x[j] for j in range(len(x))) for i in range(len(w))])


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


def gptplus(p, cfg, tokens):
    h = [p["W_e.weight"][t] for t in tokens]
    for layer in range(cfg.n_layers):
        b = {k.split(".", 2)[2]: w for k, w in p.items() if k.startswith(f"blocks.{layer}.")}
        x = [rms(a) * b["norm_a.gamma"] for a in h]
        av = multi_head(x, b["W_qkv.weight"], cfg, lambda q, _: norm(q), lambda k, _: norm(k), b["g.stored"][0])
        h = [a + matvec(b["W_p.weight"], c) for a, c in zip(h, av, strict=True)]
        for t in range(len(h)):
            uz = matvec(b["W_uz.weight"], rms(h[t]) * b["norm_m.gamma"])
            u, z = uz[: cfg.d_mlp], uz[cfg.d_mlp :]
            h[t] = h[t] + matvec(b["W_d.weight"], u * silu(z))
    return torch.stack([matvec(p["W_h.weight"], rms(a) * p["norm_h.gamma"]) for a in h])


def ngpt(p, cfg, tokens):
    root = math.sqrt(cfg.d_model)
    h = [p["W_e.weight"][t] for t in tokens]
    for layer in range(cfg.n_layers):
        b = {k.split(".", 2)[2]: w for k, w in p.items() if k.startswith(f"blocks.{layer}.")}
        # Stored at 1/sqrt(d_m), starting at 1: s = sqrt(d_m) · stored. α starts at 0.05.
        s_qk = b["s_qk.stored"] * root
        alpha_a = torch.abs(b["alpha_a.stored"] * 0.05 * root)
        alpha_m = torch.abs(b["alpha_m.stored"] * 0.05 * root)
        s_u, s_z = b["s_uz.stored"][: cfg.d_mlp], b["s_uz.stored"][cfg.d_mlp :]

        def gained(x, part, s_qk=s_qk):
            return norm(x) * s_qk[part]

        av = multi_head(h, b["W_qkv.weight"], cfg, gained, gained, math.sqrt(cfg.d_head))
        for t in range(len(h)):
            h_a = norm(matvec(b["W_p.weight"], av[t]))
            h[t] = norm(h[t] + alpha_a * (h_a - h[t]))
            uz = matvec(b["W_uz.weight"], h[t])
            u, z = uz[: cfg.d_mlp] * s_u, uz[cfg.d_mlp :] * s_z * root
            h_m = norm(matvec(b["W_d.weight"], u * silu(z)))
            h[t] = norm(h[t] + alpha_m * (h_m - h[t]))
    return torch.stack([p["s_z.stored"] * root * matvec(p["W_h.weight"], a) for a in h])


def angpt(p, cfg, tokens):
    nu_qkv, nu_p = math.sqrt(cfg.d_model / cfg.d_head), math.sqrt(cfg.d_head / cfg.d_model)
    nu_uz, nu_acf, nu_d = math.sqrt(1 / 4), 3.74, math.sqrt(4)

    def update(h, x, alpha):
        nu = 1 / torch.sqrt(alpha * alpha + (1 - alpha) * (1 - alpha))
        return (h + alpha * (x - h)) * nu

    h = [p["W_e.weight"][t] for t in tokens]
    for layer in range(cfg.n_layers):
        b = {k.split(".", 2)[2]: w for k, w in p.items() if k.startswith(f"blocks.{layer}.")}
        # Stored at 0.01, starting at 0.05.
        alpha_a, alpha_m = b["alpha_a.stored"] * 5, b["alpha_m.stored"] * 5
        g = b["g.stored"][0]
        av = multi_head(h, b["W_qkv.weight"], cfg, lambda q, _: norm(q), lambda k, _: norm(k), g, nu_qkv)
        for t in range(len(h)):
            h[t] = update(h[t], norm(matvec(b["W_p.weight"], av[t]) * nu_p), alpha_a)
            uz = matvec(b["W_uz.weight"], h[t]) * nu_uz
            u, z = uz[: cfg.d_mlp], uz[cfg.d_mlp :]
            h[t] = update(h[t], norm(matvec(b["W_d.weight"], u * silu(z) * nu_acf) * nu_d), alpha_m)
    return torch.stack([p["s_z.stored"] * 100 * matvec(p["W_h.weight"], a) for a in h])


MODELS = {"gpt+": gptplus, "ngpt": ngpt, "angpt": angpt}
