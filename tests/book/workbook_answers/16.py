# rotary.frequencies
def frequencies(d_k, base=10000.0):
    return tuple(1 / base ** (j / d_k) for j in range(0, d_k, 2))


# rotary.angles
def angles(x, positions, omega):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if isinstance(positions, int):
        positions = positions + torch.arange(x.shape[-2], device=x.device)
    speeds = torch.as_tensor(omega, dtype=dtype, device=x.device)
    return torch.einsum("...n,i->...ni", positions.to(dtype), speeds)


# rotary.turn
def turn(x, angle, interleaved, magnitude=1.0):
    c, s = torch.cos(angle) * magnitude, torch.sin(angle) * magnitude
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    a, b = pairs.to(angle.dtype).unbind(dim=-1)
    turned = torch.stack([a * c - b * s, a * s + b * c], dim=-1)
    return (turned if interleaved else turned.mT).flatten(-2).to(x.dtype)


# rotary.rotate
def rotate(x, positions=0, base=10000.0, interleaved=False):
    speeds = frequencies(x.shape[-1], base)
    angle = angles(x, positions, speeds)
    return turn(x, angle, interleaved, magnitude=1.0)


# rotary.turns_of
def turns_of(omega, length):
    around = 2 * math.pi
    return tuple([speed / around * length for speed in omega])


# rotary.ramp_of_turns
def ramp_of_turns(omega, length, slow, fast):
    shares = []
    for turns in turns_of(omega, length):
        if turns <= slow:
            shares.append(0.0)
        elif turns >= fast:
            shares.append(1.0)
        else:
            shares.append((turns - slow) / (fast - slow))
    return tuple(shares)


# rotary.ramp_of_pairs
def ramp_of_pairs(d_k, base, length, slow, fast):
    def pair(turns):
        return (
            d_k * (math.log(length / turns) - math.log(2 * math.pi)) / (2 * math.log(base))
        )

    first, last = max(0, math.floor(pair(fast))), min(d_k - 1, math.ceil(pair(slow)))
    width = 0.001 if last == first else last - first
    return tuple(1 - min(1.0, max(0.0, (i - first) / width)) for i in range(d_k // 2))


# rotary.scale_frequencies
def scale_frequencies(d_k, base, scaling, factor, length, turns):
    if scaling == "ntk":
        if d_k == 2:
            return omega
        return frequencies(d_k, base * factor ** (d_k / (d_k - 2)))
    slow, fast = TURNS.get(scaling, (1.0, 1.0)) if turns is None else turns
    if scaling == "yarn":
        kept = ramp_of_pairs(d_k, base, length, slow, fast)
    elif scaling == "llama3":
        kept = ramp_of_turns(omega, length, slow, fast)
    else:
        kept = [0.0] * len(omega)
    return tuple(w * (g + (1 - g) / factor) for g, w in zip(kept, omega, strict=True))
