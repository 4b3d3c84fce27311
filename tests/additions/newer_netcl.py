"""netcl as a newer release might be: its autograd has softsign."""

from netcl import autograd

exec("def softsign(x, tape=None):\n    return div(x, add(abs(x), 1.0))", vars(autograd))
