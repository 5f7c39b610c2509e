"""DeiT-S from ImageNet-1k to CIFAR-100, with DropIT and Mesa.

Not measured here (no CIFAR-100, no weights). A row of the DropIT paper, gamma=0.9 with Mesa's 8
bits, whose figure is not repeated here; without Mesa it reports 89.7 % plain, 90.1 % with DropIT.
All else is as for DeiT-S, which this goes on from.

DropIT's values are kept in 8 bits, too. All else that is saved is quantised with the running ranges
of its heads or channels.

Source: Z. Pan et al., Mesa: A Memory-saving Training Framework for Transformers, 2021.
"""

_base_ = 'deit_vit-small-p16_2xb384-1000e_cifar100.py'

dropit = dict(value_bits=8)
quantized_activations = dict(bits=8, ranges='running')
