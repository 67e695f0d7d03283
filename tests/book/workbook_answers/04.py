# projection.Projection
class Projection:
    def __init__(self, in_features, out_features, bias=True):
        linear = nn.Linear(in_features, out_features, bias=bias)
        self.out_features = out_features
        self.in_features = in_features
        self.W = nn.Parameter(linear.weight.detach().T.clone())
        self.register_parameter("b", linear.bias)

    def forward(self, input):
        tall = input.reshape(-1, self.in_features)
        product = tall @ self.W if self.b is None else torch.addmm(self.b, tall, self.W)
        return product.reshape(*input.shape[:-1], self.out_features)
