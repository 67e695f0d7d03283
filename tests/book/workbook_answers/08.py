# feed_forward.FeedForwardNetwork
class FeedForwardNetwork:
    def __init__(self, d_model, d_ff=None, dropout=0.0, activation=torch.relu):
        self.dropout = require_probability("dropout", dropout)
        self.activation = activation
        if d_ff is None:
            d_ff = d_model * 4
        self.linear_1 = Projection(in_features=d_model, out_features=d_ff)
        self.linear_2 = Projection(in_features=d_ff, out_features=d_model)

    def forward(self, input):
        x = self.linear_1(input)
        x = self.activation(x)
        if self.training:
            x = F.dropout(x, p=self.dropout)
        return self.linear_2(x)
