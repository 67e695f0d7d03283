# gpt2.gelu_tanh
import math


def gelu_tanh(z):
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z.pow(3))
    return z * torch.sigmoid(2 * inner)  # which is half of one plus the tangent


# pretrained.Into
class Into:
    def shape(self, here):
        whole = list(here[self.parameters[0]].shape)
        whole[-1] = 0
        for name in self.parameters:
            whole[-1] += here[name].size(-1)
        if self.transposed:
            whole.reverse()
        return tuple(whole)

    def parts(self, whole, here):
        dim, at, found = (0 if self.transposed else whole.dim() - 1), 0, []
        for name in self.parameters:
            columns = here[name].size(-1)
            piece = whole.narrow(dim, at, columns)
            found.append(piece.t() if self.transposed else piece)
            at += columns
        return found


# gpt2.names_of
def names_of(blocks, prefix=""):
    maps = {"attn.c_proj": "attention.out_proj", "mlp.c_fc": "feed_forward.linear_1"}
    maps["mlp.c_proj"] = "feed_forward.linear_2"
    names = dict([("wte.weight", "token_embedding.weight"), ("wpe.weight", "positions")])
    for kind, of_norm, of_map in [("weight", "gamma", "W"), ("bias", "beta", "b")]:
        for n in range(blocks):
            for theirs, ours in maps.items():
                names[f"h.{n}.{theirs}.{kind}"] = f"blocks.{n}.{ours}.{of_map}"
            heads = [f"blocks.{n}.attention.{x}_proj.{of_map}" for x in ("q", "k", "v")]
            names[f"h.{n}.attn.c_attn.{kind}"] = Into(parameters=tuple(heads))
            for norm in "12":
                names[f"h.{n}.ln_{norm}.{kind}"] = f"blocks.{n}.norm_{norm}.{of_norm}"
        names[f"ln_f.{kind}"] = f"norm.{of_norm}"
    return {prefix + name: into for name, into in names.items()}


# pretrained.load_into
def load_into(module, tensors, names, *, ignored=(), dtype=None, device=None, report=None):
    def fill(name):
        whole, into = tensors[name], plan[name]
        for parameter, piece in zip(into.parameters, into.parts(whole, here), strict=True):
            value = torch.empty(piece.shape, dtype=dtype, device=device or "cpu")
            value.copy_(piece)
            put_parameter(module, parameter, value, here[parameter].requires_grad)

    for name in tensors:
        if name not in plan:
            continue
        fill(name)  # what it holds is gone when it returns
        done = done + sizes[name]
        report(name, done, total)


# gpt2.GPT2
class GPT2:
    def from_pretrained(cls, folder, *, attention, dtype, device, report):
        device_without_memory = torch.device("meta")
        with device_without_memory:
            model = cls(attention=attention, **options)
        prefix = "transformer." if "transformer.wte.weight" in tensors else ""
        refuse_another_head(tensors, prefix)
        ignored = ["lm_head.weight"]
        for n in range(len(model.blocks)):
            ignored += [f"{prefix}h.{n}.attn.bias", f"{prefix}h.{n}.attn.masked_bias"]
        table = names_of(blocks=len(model.blocks), prefix=prefix)
        form = dict(dtype=dtype, device=device)
        load_into(model, tensors, table, ignored=ignored, report=report, **form)
        model.train(False)
        return model


# gpt2.without_head
def without_head(model, block, head):
    d_k = layer.out_proj.W.shape[0] // layer.num_heads
    every = layer.out_proj.W.data
    kept = [row.clone() for row in every[head * d_k : (head + 1) * d_k]]
    every[head * d_k : (head + 1) * d_k] = 0
    try:
        yield None
    finally:
        for number, row in enumerate(kept):
            every[head * d_k + number] = row
