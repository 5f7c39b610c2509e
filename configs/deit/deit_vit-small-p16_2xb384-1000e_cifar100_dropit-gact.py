"""DeiT-S from ImageNet-1k to CIFAR-100, with DropIT and GACT.

Not measured here (no CIFAR-100, no weights). A row of the DropIT paper, gamma=0.9 with GACT at its
level L2, whose figure is not repeated here; without GACT it reports 89.7 % plain, 90.1 % with
DropIT. All else is as for DeiT-S, which this goes on from.

DropIT's values are kept in 4 bits. All else that is saved is quantised to 4 bits on average, which
are allotted by sensitivity in the first iteration and after every 1000.

Source: X. Liu et al., GACT: Activation Compressed Training for Generic Network Architectures,
ICML 2022.
"""

_base_ = 'deit_vit-small-p16_2xb384-1000e_cifar100.py'

dropit = dict(value_bits=4)
quantized_activations = dict(level='L2', allot_every=1000)
