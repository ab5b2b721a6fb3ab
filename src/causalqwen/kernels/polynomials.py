"""What the fused kernels take logarithms of distribution functions by, in float32."""

# (1 - Phi(x))/phi(x), x >= 0, is sum_j MILLS_j t^j, t = 1/(1 + x/4), j from 1, within 4e-8 (float32 makes it 4e-7): our
# own fit of the least largest relative error, made with mpmath; `tests/test_kernels.py` holds it to that.
MILLS = (
    0.2499999875, 0.2500024419, 0.2342796882, 0.2046007597, 0.1475747572,
    0.1603895241, -0.08072356236, 0.240843697, -0.2033885745, 0.04973537813,
)  # fmt: skip

# atan(z)/z on [0, 1] as a polynomial in z^2, from its highest power, within 2e-8; a fit of the same kind.
ATAN = (
    0.00284980641, -0.01606829675, 0.04269098064, -0.07504249084, 0.1064091279,
    -0.1420363908, 0.1999261872, -0.3333307331, 0.9999999848,
)  # fmt: skip
