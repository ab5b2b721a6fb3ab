"""Finding, transforming and writing numbers."""

import contextlib
import json
import math
import time
import timeit
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causalqwen.modeling import NumberPrediction
from causalqwen.numbers import (
    CRPS_LEVELS,
    KINDS,
    PROTECTED,
    NumberRules,
    NumberStyle,
    ValueLaw,
    ValueTransform,
    find_numbers,
    finest_place,
    format_number,
    last_place,
    round_significant,
    spaced,
    symlog,
)
from causalqwen.numbers.law import PARTS, WANTED_LEVELS
from causalqwen.numbers.support import Support

READ = [
    ("It is 42.", [42.0]),
    ("-5", [-5.0]),
    ("(-3) and = -3 and x=-4", [-3.0, -3.0, -4.0]),
    ("−7 degrees", [-7.0]),
    ("+3.5", [3.5]),
    (".5 of it", [0.5]),
    ("1,272.50 dollars", [1272.5]),
    ("3,000,000 people", [3e6]),
    ("12,34", [12.0, 34.0]),
    ("3-4 apples", [3.0, 4.0]),
    ("10 - 20", [10.0, 20.0]),
    ("6.02e23 and 1E-3", [6.02e23, 1e-3]),
    ("１２．５ and ５００", [12.5, 500.0]),
    ("5% and 25.5%", [5.0, 25.5]),
    ("价格是99.9元", [99.9]),
    ("10km, 5kg, 100m/s and 20°C", [10.0, 5.0, 100.0, 20.0]),
    ("$5 or €7.20", [5.0, 7.2]),
    ("0 and 0.5 but -0", [0.0, 0.5, -0.0]),
    ("(1,2) is a point", [1.0, 2.0]),
    ("18926408486.48 or 15000000000 or 18926408486 kg", [18926408486.48, 15e9, 18926408486.0]),
    ("counted...5 and 1..10", [5.0, 1.0, 10.0]),
    ("6.02×10^23, 1.6×10^-19, 3 x 10^{5}, 2×10⁵ and 10⁻⁹ m", [6.02e23, 1.6e-19, 3e5, 2e5, 1e-9]),
    ("1万5000年前, 1万5, 3万5千", [15000.0, 15000.0, 35000.0]),
    ("-$1,200, (−€5.50) but a-$5", [-1200.0, -5.5, 5.0]),
    ("-¥3.5亿, -₹1,00,000, -$1.5e6, -$.50, -US$5 and -USD 5", [-3.5e8, -1e5, -1.5e6, -0.5, -5.0, -5.0]),
    ("￥５ 和 -￥５", [5.0, -5.0]),
    ("100元-200元，10万-20万，5℃-10℃，5公里-10公里", [100.0, 200.0, 1e5, 2e5, 5.0, 10.0, 5.0, 10.0]),
    ("3000元/月-5000元/月, 5€-10€, 5kg-10kg", [3000.0, 5000.0, 5.0, 10.0, 5.0, 10.0]),
    ("利润为-5万元, 同比-5.2%", [-5e4, -5.2]),
    ("投资5万2023年完成，奖金10万2024-01-05", [5e4, 1e5]),
    ("房价2万5一平，月薪1万5-2万，去了1万3次", [25000.0, 15000.0, 20000.0, 10000.0, 3.0]),
    ("500-1000 words, 200-1234元, $500-1500", [500.0, 1000.0, 200.0, 1234.0, 500.0, 1500.0]),
    ("+3.14159265 or +1.5 -2.0 3.7 or +10000000", [3.14159265, 1.5, -2.0, 3.7, 1e7]),
    ("3X10^5", [3e5]),
    ("月薪1万2000-1万5000元，5万2000-6万, 1万2000/月", [12000.0, 15000.0, 52000.0, 60000.0, 12000.0]),
    ("共1万2000. 1万2000, 2万5000", [12000.0, 12000.0, 25000.0]),
    ("茅台1万1瓶，共3万5星，1万1元", [10000.0, 1.0, 30000.0, 5.0, 11000.0]),
    ("哈尔滨1月-20℃，2023年-5%，茅台1800元-1.5%, 5，-3，2", [1.0, -20.0, -5.0, 1800.0, -1.5, 5.0, -3.0, 2.0]),
    ("100美元-200美元，3点-5点，5个月-6个月，100 元-200 元", [100.0, 200.0, 3.0, 5.0, 5.0, 6.0, 100.0, 200.0]),
    ("The boiling point of 1,2-dichloroethane (C2H4Cl2) is 356.6 K.", [356.6]),
    ("R1,500 and R 500 and R12.50 and R1 500", [1500.0, 500.0, 12.5, 1500.0]),
    ("USD1,234.50, EUR99, GBP.50", [1234.5, 99.0, 0.5]),
    ("Rs.500, Rs. 1,500, Rs1,500.50, Rs 12", [500.0, 1500.0, 1500.5, 12.0]),
    ("CHF 12, CHF12.50, CHF1,200", [12.0, 12.5, 1200.0]),
    ("1500kr, 12zł, 50Kč, 1,500 kr., 200₽, 50฿", [1500.0, 12.0, 50.0, 1500.0, 200.0, 50.0]),
    ("NT$1,000 C$5 R$ 5 HK$7.50 ₦500 ₿0.5", [1000.0, 5.0, 5.0, 7.5, 500.0, 0.5]),
    ("Rp50,000 RM12.90 KSh300 kr500 PHP1,200.00 TRY75.50", [50000.0, 12.9, 300.0, 500.0, 1200.0, 75.5]),
    ("1500円, 20원, 30港元, 500 ISK, 3.5AED", [1500.0, 20.0, 30.0, 500.0, 3.5]),
    ("from €1 500 to 12 000 kr, 10 000 people", [1500.0, 12000.0, 10000.0]),
    ("-$ 45.10, $-45.10, $ -45.10, -€5, −45 €, - $5", [-45.1, -45.1, -45.1, -5.0, -45.0, 5.0]),
    ("-R1,500, USD-1,234.50, -Rs. 500, -CHF 3, EUR -7", [-1500.0, -1234.5, -500.0, -3.0, -7.0]),
    ("-R11'10", [-11.0, 10.0]),
    ("($1,234.50)", [-1234.5]),
    ("(45.10)", [45.1]),
    ("| (1,234) | 45.10- | (5) | (0.12) |", [-1234.0, -45.1, 5.0, 0.12]),
    (
        "($1.2m)\n(€5)\n(USD 1,200)\n(£3bn)\n($1.2 million)\n(1 234)\n(12.5%)\t(3.14)\n$(1.2m)",
        [-1200000.0, -5.0, -1200.0, -3e9, -1200000.0, -1234.0, 12.5, 3.14, -1200000.0],
    ),
    ("$(45.10) is", [-45.1]),
    ("the cheap one ($45.10) of (1972) and (3.50)", [45.1, 1972.0, 3.5]),
    (
        "$85K, £2.5m, $3B, €4bn, ₹5Cr, $1.2T, -$10k, US$3mm",
        [85000.0, 2500000.0, 3000000000.0, 4000000000.0, 50000000.0, 1200000000000.0, -10000.0, 3000000.0],
    ),
    ("$85K-$95K, £5m-£6m, Tk.500, RM.20, KSh.1,500", [85000.0, 95000.0, 5000000.0, 6000000.0, 500.0, 20.0, 1500.0]),
    ("85K USD, 2.5M€, USD 85K, USD3B, Rs. 5L", [85000.0, 2500000.0, 85000.0, 3000000000.0, 500000.0]),
    ("4bn and 2.5 mln", [4000000000.0, 2500000.0]),
    (
        "1.5 lakh, 2 crore, 3 thousand, 3.5 Million, 2 billions, 2 dozen, 5 hundred",
        [150000.0, 20000000.0, 3000.0, 3500000.0, 2000000000.0, 24.0, 500.0],
    ),
    ("a 3.5-million-dollar or 5-million plan of 5 crore 20 lakh", [3500000.0, 5000000.0, 52000000.0]),
    ("-$2 million, −3.5 million", [-2000000.0, -3500000.0]),
    ("351K and 10m and 5 B vitamins", [351.0, 10.0, 5.0]),
    ("负3.9%，负三百，负5，零下5度，零下三十度，負７", [-3.9, -300.0, -5.0, -5.0, -30.0, -7.0]),
    ("三百五十六点七，二十点五，三点一四，零点五，三点五万，三百点五万", [356.7, 20.5, 3.14, 0.5, 35000.0, 3005000.0]),
    ("百分之三十五点五，百分之负三点五，百分之3.5", [35.5, -3.5, 3.5]),
    ("两千，两千五百，1亿2,000万，1万零500，3万零5", [2000.0, 2500.0, 120000000.0, 10500.0, 30005.0]),
    ("3胜2负5平，背负30万债务，正负5", [3.0, 2.0, 5.0, 300000.0, 5.0]),
    ("5个半导体，三百五十六点七分", [5.0, 356.7]),
    ("1.2E–5, 1.2e−5, 3E‑2, 5e–3", [1.2e-05, 1.2e-05, 0.03, 0.005]),
    ("is ‑5, at –5.2 K, (–3), =–4, < –.5, € –45", [-5.0, -5.2, -3.0, -4.0, -0.5, -45.0]),
    ("–5.2", [-5.2]),
    ("a\n–45 €\nb", [-45.0]),
    ("–5 apples\n– 6 pears\n–$5 fee", [5.0, 6.0, 5.0]),
    ("–$5\n–USD 5\n–£1.2bn\n–3.5万\n–5 million\n–5%", [-5.0, -5.0, -1.2e9, -35000.0, -5e6, -5.0]),
    ("4.5,–2 or (3,–2) or [3, –2] or 1;–5;2 or 7\t–8", [4.5, -2.0, 3.0, -2.0, 3.0, -2.0, 1.0, -5.0, 2.0, 7.0, -8.0]),
    ("€1 500–2 500, 1 500-2 500 kr, 10 000–20 000", [1500.0, 2500.0, 1500.0, 2500.0, 10000.0, 20000.0]),
    ("85K dollars, 85k euros, 2.5m Australian dollars, 10 M pounds", [85000.0, 85000.0, 2500000.0, 10000000.0]),
    (
        "€5 Mrd, 5 Mio, 2 mrd, $5bln, 5 bln, £5 trn, 5 trn, 3 mld zł, ₹5 Lac, 5 lacs",
        [5e9, 5e6, 2e9, 5e9, 5e9, 5e12, 5e12, 3e9, 5e5, 5e5],
    ),
    ("€1bn, 2bn or 3bn, €1bn–2bn, $85K/$95K", [1e9, 2e9, 3e9, 1e9, 2e9, 85000.0, 95000.0]),
    ("5 miles, 5 millionaires, 5 miller, in 2018 and 3 million", [5.0, 5.0, 5.0, 2018.0, 3e6]),
    ("[1.e-05 2.e+00 -3.E+10], 1.5e-3", [1e-5, 2.0, -3e10, 0.0015]),
    ("75000 80000, 70123 45678 90000, 1300 655 506 12", [75000, 80000, 70123, 45678, 90000, 1300, 655, 506, 12]),
    ("$5,10,15 and 3.5 pm, 5 amps", [5.0, 10.0, 15.0, 3.5, 5.0]),
    ("5–6, 5 –6, 10%–20%, $5–$10, 5 km –10 km", [5.0, 6.0, 5.0, 6.0, 10.0, 20.0, 5.0, 10.0, 5.0, 10.0]),
    ("COVID‑19 of 5", [5.0]),
    (
        "$1.5 \\times 10^6$, 1.5 \\cdot 10^{-3}, 1.5 × 10 ^ 6, 2*10**3, 10^–3",
        [1500000.0, 0.0015, 1500000.0, 2000.0, 0.001],
    ),
    ("$5 and x_1 costs $6, 5$-6$", [5.0, 6.0, 5.0, 6.0]),
    ("1,234.5 and 1.234,5.678", [1234.5, 1.234, 5.678]),
    ("On May 5, 2024. and 5 apples", [5.0]),
]

KEPT_AS_TEXT = [
    "x1 and fp16 and H2O and CO2",
    "COVID-19, GPT-4, F-16",
    "2024-01-05, 05.01.2024, 1/5/2024, 2024-01-05T12:30:00Z",
    "Jan 5, 2024 or 5 January 2024 or May 5",
    "2024年1月5日 和 1月5日",
    "12:30 or 12:30:45 or 3:16",
    "v1.2 and 1.2.3 and 1.2.3-rc1",
    "192.168.0.1",
    "007 and 00501",
    "call 555-1234 or (555) 123-4567 or +86 138-0013-8000 or 13800138000",
    "1-800-555-0199, 64-17-5",
    "1/2",
    "3D, 1st, 4x4, 0x1f, 10x",
    "the 5-year plan",
    "1,2-dichloroethane, 2-(2-methoxyethoxy)ethanol, 7-azabicyclo[4.1.0]heptane, (1r,2s)-cyclohexane",
    "#123 and file.7z and 1_000",
    "me5@mail.org and https://a.b/c?d=5",
    "0,001 and 1000,000",
    "10^400",
    "-0,001 and -1000,000, -1/2, -12:30, -3:1, -1.2.3, -007 and -1-2-3",
    "-$1000,000, -$1.2.3, -$007, -$12:30, -$3/4",
    "Tel: +86 10 62345678 or +49 (0)30 123456, +1 555-1234567, +55 11 91234-5678, +852-21234567, (+49) 30 123456",
    "Call 310-5550 or 250-4680",
    "+44 20 7946 0958, +33 1 23 45 67 89, +1 (555) 123-4567, +8613800138000, +86 13800138000",
    "十二三岁和二十二三岁",
    "2½ and 2 1/2 and 1⁄2 and 2¹⁄₂ and 2-1/2 and ⅔ and 2\u00a0½ and 2\u202f1/2 and 1/2.5",
    "2 hundred thousand, $2 hundred million, ₹2 lakh crore, 100 thousand million",
    "3 and a half, 3个半小时, 两百年半, 3年半",
    "minus 5 and negative 3.5",
    "2001:db8::1, fe80::1%eth0, [2001:db8::1]:443, ::ffff:192.0.2.1, 2001:db8::/32",
    "192.168.0.1:8080 and 10.0.0.0/8",
    "00:1A:2B:3C:4D:5E, 00-1A-2B-3C-4D-5E, 001a.2b3c.4d5e",
    "12345678-1234-1234-1234-123456789012, 550e8400-e29b-41d4-a716-446655440000",
    "07700 900123, (020) 7946 0958, 020 7946 0958, 01 23 45 67 89, 0171-123 4567, 010-62345678, 030/1234567",
    "+44 20 7946 0958, (555) 123-4567, 1 (555) 123-4567 ext. 89, 1-555-123-4567, +49 30/123456",
    "Tel: 62345678, phone 5551 2345, 电话：62345678",
    "ISBN 978-3-16-148410-0, ISBN 0 306 40615 X, 978 3 16 148410 0, ISSN 1234-5678, arXiv:1706.03762, doi:10.1000/182",
    "10.1038/123.4",
    "4111 1111 1111 1111, DE89 3704 0044 0532 0130 00",
    "40°26′46″N 5'10\" 5′10″",
    "1.234,50 EUR and 1.234.567,89 €",
    "6.02×10-23",
    "3B, 1990s, '90s, 85k, TOP10, COP26, AMD64, NAD83, MAD2, CHF3, R2, R134a",
    "No.1,500 and x1,500 and P1,500.50",
    "十点三十分，十二点半，八点二十，九点一刻，一点一滴，差一点",
    "负百分之三点五，十二又三分之一，千分之三",
    "2024-01 and Jan. 5, 2024.",
    "€10–20K, £2–3m, $2-3 million, USD 10 to 20K, €10 to €20m, $2–$3 million, -€10–20K",
    "£2m–3m, €10K-20K, 10K-20K USD, 10–20M€, 10 to 20K dollars, €10–20 K, $10 K – 20 K, 10 K–20 K USD",
    "$10K, 20K and 30K, £5m/6m; $3 tn–4 tn",
    "2-3 million, 3 to 4 dozen, between 2 and 3 million, 2 or 3 billion, 2–3bn, 10~20万元, 1-2万5千人, 3至5亿",
    "2-½ and 3-¾ cups, 2½ million, £2½m, 2½万, 1/2 a million, $1 ½ bn, ½K USD",
    "€1 234,50 and R1 500,00, 1 234,50 kr, CHF 1'234,50, $1\u00a0234,5, €12,50, 0,99 €, 1234,50 EUR, -€12,50, R12,50",
    "5 mil, $5 mil, 5 grand, 5 Millionen, 5 milliards, 2 quadrillion, 5 Tausend, 5 млн, 5만 원, 3 thousandths",
    "$30 M and $40 L, $5 m long, £5 k, ₹5 L, USD 5 b",
    "Dell R740, BMW R1200, the R740 server, R500, -R500",
    "98765 43210, 98765-43210, 70123 45678 or +91 98765 43210",
    "1300 655 506 or 1800 123 456 or 1900 123 456",
    "12.30 pm, 3 pm, 9 a.m., 7.05 AM, 10 P.M., 3-5 pm, 12.30–1.15 pm, 9 to 10 am",
]


ALL = NumberRules(kinds=KINDS)
COMMA = NumberRules(decimal=",")
FEW = NumberRules(kinds=("number",), protected=PROTECTED[1:], groups=",")
RULES = [FEW, NumberRules(), ALL, COMMA, NumberRules(kinds=KINDS, decimal=",", groups=" .")]

TOLD = [  # text, rules, (value, kind, unit) of each number
    ("5% of $1,272.50 and 20 USD", None, [(5, "percent", "%"), (1272.5, "currency", "$"), (20, "currency", "USD")]),
    ("3-4 km, 10–20%", None, [(3, "range", "km"), (4, "range", "km"), (10, "range", "%"), (20, "percent", "%")]),
    ("-$1,200 at 1.5×10^3 K", None, [(-1200, "currency", "$"), (1500, "scientific", "K")]),
    ("-HK$3.5, -$2万", None, [(-3.5, "currency", "$"), (-20000, "chinese", "$")]),
    ("10~20万元, 10～20元", None, [(10, "range", "元"), (20, "currency", "元")]),
    ("-$5", FEW, [(5, "number", "$")]),
    ("6.02e23 at 351 K, 5 in total", None, [(6.02e23, "scientific", ""), (351, "number", "K"), (5, "number", "")]),
    (
        "12,34,567 or 1\u202f272,5 or 1'272",
        None,
        [(1234567, "lakh", ""), (1272, "number", ""), (5, "number", ""), (1272, "number", "")],
    ),
    ("3.5万元、2亿、3万5千", None, [(35000, "chinese", "元"), (2e8, "chinese", ""), (35000, "chinese", "")]),
    ("三百二十人，一亿零五万", None, [(320, "chinese", "人"), (100050000, "chinese", "")]),
    ("两千零五、十五、买了三萬五", None, [(2005, "chinese", ""), (15, "chinese", ""), (35000, "chinese", "")]),
    ("百分之三十五点五、百分之五", None, [(35.5, "chinese", "%"), (5, "chinese", "%")]),
    ("３千克，1.1万", None, [(3, "number", "千克"), (11000, "chinese", "")]),
    (
        "1.272,50 € und -0,5 und 1.234.567",
        COMMA,
        [(1272.5, "currency", "€"), (-0.5, "number", ""), (1234567, "number", "")],
    ),
    ("1/2 or -3 1/2 or 2½ on 1/5/2024", ALL, [(0.5, "fraction", ""), (-3.5, "fraction", ""), (2.5, "fraction", "")]),
    ("Twenty-one of two hundred and five", ALL, [(21, "english", ""), (205, "english", "")]),
    ("-e£5112 million, -US$2 million", None, [(5112e6, "scaled", "£"), (-2e6, "scaled", "$")]),
    ("one of 3.5 million, a hundred thousand", ALL, [(3.5e6, "scaled", ""), (1e5, "english", "")]),
    ("5% of 3 and 3.5万", FEW, [(5, "number", "%"), (3, "number", "")]),
    ("5% of 3", NumberRules(kinds=("percent",)), [(5, "percent", "%")]),
    ("at 12:30, `x = 5`", NumberRules(protected=("code",)), [(12, "number", ""), (30, "number", "")]),
    (
        "$x^2$ and $$y = 7$$ and $5$, but $6 and 7$",
        None,
        [(2, "number", ""), (7, "number", ""), (5, "number", ""), (6, "currency", "$"), (7, "currency", "$")],
    ),
    ("R1,500, $85K, -Rs. 5 lakh", None, [(1500, "currency", "R"), (85e3, "scaled", "$"), (-5e5, "scaled", "Rs.")]),
    ("$1,000 C, 负3.9%, 零下5度", None, [(1000, "currency", "$"), (-3.9, "percent", "%"), (-5, "number", "度")]),
    ("12,34,567, 6×10^3, 3.5 million and 5", FEW, [(5, "number", "")]),
]

READ_BY_RULES = [
    ("forty five hundred thirty, twenty-one hundred", ALL, [4530.0, 2100.0]),
    ("two point seven, zero point zero five, three point one four million", ALL, [2.7, 0.05, 3140000.0]),
    (
        "half a million, a quarter of a million, half a dozen, a half million, three quarters of a million",
        ALL,
        [500000.0, 250000.0, 6.0, 500000.0, 750000.0],
    ),
    (
        "minus five, negative twenty-one, minus 5, ten minus five, 5 minus 3, plus or minus five, x minus five",
        ALL,
        [-5.0, -21.0, -5.0, 10.0, 5.0, 5.0, 3.0, 5.0, 5.0],
    ),
    (
        "one hundred and five, two thousand five hundred, a dozen, two dozen, two lakh",
        ALL,
        [105.0, 2500.0, 12.0, 24.0, 200000.0],
    ),
    (
        "two and a half million, one and a half, two and three quarters, 3 and a half, a million and a half",
        ALL,
        [2500000.0, 1.5, 2.75, 3.5, 1500000.0],
    ),
    ("2-½, 3-¾ cups, 2½-3 km", ALL, [2.5, 3.75, 2.5, 3.0]),
    ("two months, five teeth, at that point two of them", ALL, [2.0, 5.0]),
    ("three quarters, two-thirds, one third", ALL, [0.75, 0.6666666666666666, 0.3333333333333333]),
    ("2½, 2 1/2, 1⁄2, 2¹⁄₂, 2-1/2, -3 1/2, 2\u00a0½", ALL, [2.5, 2.5, 0.5, 2.5, 2.5, -3.5, 2.5]),
    ("minus three and a half, 3.5 and a half million", ALL, [-3.5, 4000000.0]),
    ("1.5 EUR, .5 or 1.25, €1 234.50", COMMA, []),
    (
        "1.234,50 EUR, 1.234, 1,5 Mio, R1.500,50, -€ 5,5, 3,5 million",
        COMMA,
        [1234.5, 1234.0, 1500000.0, 1500.5, -5.5, 3500000.0],
    ),
    ("1,234.50 $", COMMA, []),
    ("12 345,67 zł, $85,5K", COMMA, [12345.67, 85500.0]),
]

WORDS = [
    ("万一十分，千万，一个，万一十分钟没到", None),
    ("第三十二章，几百万，二十多万，30多万，三五百，一五一十，十六分之一", None),
    ("二〇二四年十二月二十五日 和 十二号", None),
    ("`x = 5` and ```y = 6```", None),
    ("one of them, a twenty-year-old, 1/0 and 1/5/2024", ALL),
    ("05.01.2024 and 192.168.0.1", COMMA),
    ("point five, point twenty, one point twenty five, nine point nineteen, zero point five twenty", ALL),
    ("one hundredth, two thousandths, one millionth, three sixteenths, twenty five hundredths, one twentieth", ALL),
    ("2½ million, £2½m, 2½万, 1/2 a million, 3/4 bn, ½K USD", ALL),
    ("twenty fifth, nineteen eighty-four, six thirty, one two three, a third, half, one of a million", ALL),
]


@pytest.mark.parametrize(("text", "rules", "told"), TOLD)
def test_kinds_and_units_are_told(text, rules, told):
    assert [(span.value, span.kind, span.unit) for span in find_numbers(text, rules)] == told


def test_rules_are_plain_data_and_refuse_what_they_do_not_know():
    assert NumberRules.of(json.loads(json.dumps(COMMA.to_dict()))) == COMMA
    assert NumberRules.of(None) == NumberRules() and NumberRules.of(ALL) is ALL
    for wrong in ({"kinds": ["roman"]}, {"protected": ["names"]}, {"decimal": ";"}, {"groups": "."}, {"locale": "de"}):
        with pytest.raises(ValueError, match=r"roman|names|';'|'\.'|locale"):
            NumberRules.of(wrong)


@pytest.mark.parametrize(("text", "values"), READ)
def test_numbers_are_read(text, values):
    found = find_numbers(text)
    assert [span.value for span in found] == values
    assert [math.copysign(1, span.value) for span in found] == [math.copysign(1, v) for v in values]


@pytest.mark.parametrize(("text", "rules", "values"), READ_BY_RULES)
def test_numbers_are_read_by_their_rules(text, rules, values):
    assert [span.value for span in find_numbers(text, rules)] == pytest.approx(values)


@pytest.mark.parametrize(("text", "rules"), [*((text, None) for text in KEPT_AS_TEXT), *WORDS])
def test_what_only_looks_like_a_number_stays_text(text, rules):
    assert find_numbers(text, rules) == []


@pytest.mark.parametrize("rules", RULES)
@given(
    text=st.text(max_size=60)
    | st.text("0123456789.,-+eE%:/ xK年()`½'\u202f", max_size=40)
    | st.text("零一二三十百千万亿两几多第分之点0123.年月个 ", max_size=20)
    | st.lists(
        st.sampled_from(
            ["one", "two", "twenty", "-five", "hundred", "thousand", "million", "and", "a", "3.5", ",", "1,272"]
        )
    ).map(" ".join)
)
def test_spans_never_overlap_and_with_what_is_outside_are_the_text(rules, text):
    end, rendered = 0, ""
    try:
        spans = find_numbers(text, rules)
    except ValueError as error:
        assert "too large" in str(error)
        return
    for span in spans:
        assert span.start >= end and span.end > span.start and math.isfinite(span.value)
        assert span.kind in rules.kinds
        rendered += text[end : span.start] + span.text
        end = span.end
    assert rendered + text[end:] == text


@pytest.mark.parametrize("text", ["1e400", "id 72e71990", "-3.5E+999", "10^400"])
def test_a_power_of_ten_beyond_float64_is_text(text):
    assert [number.text for number in find_numbers(f"{text} of 5")] == ["5"]


@pytest.mark.parametrize(("text", "place"), [("it is " + "9" * 400 + " K", "6-406"), ("9" * 400, "0-400")])
def test_a_number_beyond_float64_is_refused_with_its_place(text, place):
    with pytest.raises(ValueError, match=f"characters {place} is too large"):
        find_numbers(text)


@pytest.mark.parametrize("rules", RULES)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_written_number_reads_back_as_itself(rules, value):
    text = format_number(value, NumberStyle(decimal=rules.decimal))
    (span,) = find_numbers(text, rules)
    assert span.text == text and span.value == value


STYLES = [
    ("$1,272.50", None),
    ("351.4 K", None),
    ("1.272.000,5 €", COMMA),
    ("1\u202f272\u202f000", None),
    ("12,5%", COMMA),
]


@pytest.mark.parametrize(("example", "rules"), STYLES)
@given(value=st.floats(-1e15, 1e15), width=st.floats(1e-3, 1e6))
def test_a_value_in_the_style_of_the_data_keeps_the_digits_that_its_interval_supports(example, rules, value, width):
    style, place = NumberStyle.of(example, rules), last_place(value, width)
    text = f"{style.before}{format_number(value, style, place)}{style.after}"
    (span,) = find_numbers(text, rules)
    assert span.unit == find_numbers(example, rules)[0].unit
    error = 0.05 * width if not style.integer else max(0.05 * width, 0.5)
    assert abs(span.value - value) <= error * (1 + 1e-9) + 1e-15 * abs(value)
    assert NumberStyle.of(text, rules).after == style.after and (style.group in span.text or abs(value) < 1000)


@pytest.mark.parametrize(
    ("value", "width", "example", "written"),
    [
        (351.234, 26.0, "5", "351"),
        (351.234, 2.6, "5.0", "351.2"),
        (351.234, 2.6, "5", "351"),
        (351.0, 2.6, "5.0", "351.0"),
        (12345.6, 5000.0, "1,000", "12,300"),
        (3.0, 1e6, "5.0", "3"),
        (-0.04, 10.0, "5", "0"),
        (1.23456e-9, 1e-10, "5.0", "1.23e-9"),
        (351.25, 0.0, "5.0", "351.25"),
        (351.25, math.inf, "5", "351"),
        (1234567.0, 10.0, "1\u00a0000 km", "1\u00a0234\u00a0567"),
    ],
)
def test_numbers_are_written_as_the_data_are(value, width, example, written):
    assert format_number(value, NumberStyle.of(example), last_place(value, width)) == written


def test_a_style_is_what_most_of_the_data_do():
    style = NumberStyle.of(["sold for $1,272", "and $3,000,000 or 5 km", "no number"])
    assert style == NumberStyle(before="$", integer=True, group=",")
    assert not NumberStyle.of(["$5", "$5.5"]).integer
    with pytest.raises(ValueError, match="hold none"):
        NumberStyle.of(["no number", "三百"])


def test_a_prediction_is_written_with_its_interval_on_demand():
    wide = ValueLaw(ValueTransform("affine", 350.0, 4.0), "gaussian")
    prediction = NumberPrediction(0.3, 2.0, 0.875, wide)
    kelvin = NumberStyle.of("The boiling point is 373.15 K.")
    assert prediction.format(style=kelvin) == "351 K"
    assert prediction.format(0.9, kelvin) == "351 K (90%: 338-364)"
    assert prediction.format(0.995) == "351 (99.5%: 329-374)"
    assert str(prediction) == "351 (90%: 338-364; P_NUM 0.875)"
    around = NumberPrediction(0.0, 2.0, 0.875, ValueLaw(ValueTransform("affine", 3.0, 4.0), "gaussian"))
    assert around.format(0.9, NumberStyle.of("5%")) == "3% (90%: -10 to 16)"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_written(value):
    with pytest.raises(ValueError, match="cannot be written"):
        format_number(value)


def test_a_space_stands_where_the_script_writes_one():
    texts = {
        0: ["costs $", "(", "of 3-", "价格是", "", "a\n", "₽"],
        1: ["is", "-", "_", "#", "5,", "가격은", "€10 ", "1\u00a0"],
        2: ["lost -$"],
    }
    for spaces, before in texts.items():
        assert {text: spaced(text, "500") for text in before} == dict.fromkeys(before, spaces)


@given(before=st.text(alphabet="a1 -+$#_^(/~.é价", max_size=8), value=st.floats(-1e9, 1e9))
def test_what_stands_before_a_number_never_becomes_part_of_it(before, value):
    written = format_number(round(value, 3))
    text = before + " " * spaced(before, written) + written
    found = find_numbers(text)
    if before[-1:] not in " .é/":  # "1. 5", and a fraction: there no number is read, with a space or without
        assert found and found[-1].text == written, text


@given(st.floats(1e-200, 1e200), st.integers(1, 8))
def test_rounding_keeps_significant_digits_and_writes_short(value, digits):
    rounded = round_significant(torch.tensor([value, -value, 0.0], dtype=torch.float64), digits)
    assert rounded[0].item() == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert rounded[1] == -rounded[0] and rounded[2] == 0


@pytest.mark.parametrize("value", [351.23456789, 98765432.1, 1e-7 / 3, 1.23456789e30, 9.87654321e-31, 7.77777777e-200])
def test_a_rounded_number_is_the_float_of_its_text(value):
    (rounded,) = round_significant(torch.tensor([value], dtype=torch.float64), 6).tolist()
    assert rounded == float(f"{value:.5e}")


BROKEN = ValueTransform("quantile", knots=((-2.0, -50.0), (-0.5, 0.25), (0.8, 7.0), (3.0, 5000.0)))


@given(st.floats(-1e6, 1e6), st.integers(-4, 0))
def test_numbers_are_no_finer_than_those_of_the_data(value, place):
    found = round_significant(torch.tensor([value], dtype=torch.float64), 12, place).item()
    assert found == pytest.approx(value, abs=0.51 * 10.0**place) and found == round(found, -place)
    assert found or math.copysign(1, found) == 1  # 0, not -0


def test_the_finest_place_of_values_is_that_of_nearly_all():
    places = [([3.0, 1200.0, 7.0], 0), ([373.15, 78.4, 1e-7], -7), ([0.25] * 99 + [1 / 3], -2), ([1e20, 5.0], 0)]
    for values, place in places:
        assert finest_place(torch.tensor(values, dtype=torch.float64)) == place


TRANSFORMS = [ValueTransform(), ValueTransform("affine", 450.0, 55.0), ValueTransform("symlog", 6.0, 0.2), BROKEN]


@pytest.mark.parametrize("transform", TRANSFORMS)
@given(value=st.floats(-1e6, 1e6), other=st.floats(-1e6, 1e6))
def test_transforms_are_monotone_and_invert(transform, value, other):
    v = torch.tensor([value, other], dtype=torch.float64)
    axis = transform.forward(v)
    torch.testing.assert_close(transform.inverse(axis), v, rtol=1e-9, atol=1e-9)
    if value < other:
        assert axis[0] <= axis[1]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_jacobian_is_the_slope(transform):
    v = torch.tensor([-3.0, 0.5, 400.0], dtype=torch.float64)
    step = 1e-6
    slope = (transform.forward(v + step) - transform.forward(v - step)) / (2 * step)
    torch.testing.assert_close(transform.log_jacobian(v), slope.log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "transform", [BROKEN, ValueTransform.fit("quantile", torch.randn(400).double().mul(10).round() / 10)]
)
def test_only_an_atom_of_a_quantile_transform_has_a_cell(transform):
    """In the middle between two knots both ends are one point: no value is given a probability of 0 as if it were an atom."""
    values = torch.tensor([value for _, value in transform.knots], dtype=torch.float64).unique()
    middles = (values[1:] + values[:-1]) / 2
    low, high = transform.cell(middles)
    assert torch.equal(low, high)
    assert bool(
        ValueLaw(transform).log_prob(torch.zeros(len(middles)), torch.ones(len(middles)), middles).isfinite().all()
    )


def test_a_quantile_transform_puts_values_at_their_normal_scores():
    values = torch.distributions.LogNormal(5.0, 2.0).sample((4000,)).double()
    fitted = ValueTransform.fit("quantile", values)
    assert 30 <= len(fitted.knots) <= 66
    axis = fitted.forward(values)
    wanted = torch.special.ndtri((values.argsort().argsort() + 0.5) / len(values)) / 0.6744897501960817
    assert (axis - wanted).abs().median() < 0.02
    again = ValueTransform(**json.loads(json.dumps(fitted.to_dict())))
    assert torch.equal(again.forward(values), axis) and torch.allclose(again.inverse(axis), values, rtol=1e-9)
    assert ValueTransform.fit("quantile", torch.full((9,), 5.0)).kind == "affine"
    with pytest.raises(ValueError, match="two knots"):
        ValueTransform("quantile")


@pytest.mark.parametrize("family", ["cauchy", "gaussian"])
@pytest.mark.parametrize("place", ["least", "greatest", "between"])
def test_an_atom_has_the_probability_of_its_piece(place, family):
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(600, generator=generator, dtype=torch.float64) * 90 + 5
    values = torch.cat([spread, torch.full((400,), {"least": 0.0, "greatest": 200.0, "between": 50.0}[place])])
    atom = values[-1]
    transform = ValueTransform.fit("quantile", values)
    low, high = transform.cell(values)
    assert torch.equal(high > low, values == atom)
    torch.testing.assert_close(transform.inverse(transform.forward(values)), values)
    assert (transform.inverse(transform.forward(atom.unsqueeze(0))) == atom).all()
    law = ValueLaw(transform, family)
    loc, scale = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    levels = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    shares = (law.quantile(loc.unsqueeze(-1), scale.unsqueeze(-1), levels) == atom).double().mean(-1)
    torch.testing.assert_close(law.log_prob(loc, scale, atom.expand(3)).exp(), shares, atol=2e-5, rtol=0)
    under = law.cdf(loc, scale, values.min() - torch.tensor([1e-3, 1.0, 1e6], dtype=torch.float64))
    if atom == values.min():  # nothing lies below a least value that is an atom
        assert under.tolist() == [0.0, 0.0, 0.0]
    below = law.cdf(loc, scale, atom.expand(3)) - shares
    for share, start in zip(shares.tolist(), below.tolist(), strict=True):
        assert share > 0.001 and -1e-4 < start < 1 - share + 1e-4
    # the least central level whose interval holds the atom: a little more holds it, a little less does not
    needed = law.central_level(loc, scale, atom.expand(3))
    for row, level in enumerate(needed.tolist()):
        one, other = loc[row : row + 1], scale[row : row + 1]
        ends = [law.interval(one, other, min(max(level + step, 1e-6), 1 - 1e-9)) for step in (1e-6, -1e-3)]
        (lower, upper), (inner, outer) = ends
        assert lower <= atom <= upper
        assert level == 0 or not inner <= atom <= outer


@pytest.mark.parametrize(("least", "greatest"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_loss_of_an_atom_is_that_of_one_point(least, greatest):
    """CRPS on the axis against an axis from which the pieces that do not change the value are cut, and its gradients."""
    spread = torch.linspace(5, 95, 300, dtype=torch.float64)
    shared = [torch.full((200,), end) for end, there in ((0.0, least), (200.0, greatest)) if there]
    values = torch.cat([spread, torch.full((150,), 50.25), *shared]).double()
    transform = ValueTransform.fit("quantile", values)
    grid = torch.linspace(-9, 9, 360_001, dtype=torch.float64)
    moves = (transform.inverse(grid).diff() != 0).double() * (grid[1] - grid[0])
    cut = torch.cat([torch.zeros(1, dtype=torch.float64), moves.cumsum(0)])

    def place(axis):
        return cut[torch.searchsorted(grid, axis.contiguous()).clamp(max=len(grid) - 1)]

    law = ValueLaw(transform, "gaussian")
    loc = torch.tensor([-2.0, 0.0, 1.0], dtype=torch.float64).repeat_interleave(4)
    scale = torch.tensor([0.3, 1.5], dtype=torch.float64).repeat(6)
    ends = [0.0 if least else 6.0, 200.0 if greatest else 94.0]
    value = torch.tensor([ends[0], 20.0, 50.25, ends[1]], dtype=torch.float64).repeat(3)
    slow = torch.zeros(12, dtype=torch.float64)
    for level in range(1, 40):
        p = torch.tensor(level / 40, dtype=torch.float64)
        gap = place(transform.forward(value)) - place(loc + scale * torch.special.ndtri(p))
        slow += 2 / 39 * torch.maximum(p * gap, (p - 1) * gap)
    torch.testing.assert_close(law.axis_crps(loc, scale, value), slow, atol=2e-4, rtol=0)
    loc.requires_grad_(True), scale.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda *law_of: law.axis_crps(*law_of, value), (loc, scale))


def test_without_atoms_the_loss_is_near_the_closed_crps():
    law = ValueLaw(ValueTransform("affine", 300.0, 20.0), "gaussian")
    loc, scale = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    value = torch.tensor([310.0, 290.0], dtype=torch.float64)
    closed = law.crps(loc, scale, value) / 20
    torch.testing.assert_close(law.axis_crps(loc, scale, value), closed, rtol=0.06, atol=0)
    torch.testing.assert_close(law.axis_losses(loc, scale, value, "nll"), -law.axis_log_prob(loc, scale, value))


def test_something_is_left_between_neighbouring_atoms():
    grades = torch.arange(1.0, 6.0, dtype=torch.float64).repeat(40)
    transform = ValueTransform.fit("quantile", grades)
    axis = [at for at, _ in transform.knots]
    assert axis == sorted(set(axis)) and len(axis) == 10
    law, one = ValueLaw(transform), torch.ones(1, dtype=torch.float64)
    assert law.log_prob(0 * one, one, 2.5 * one).isfinite().all()
    known = sum(law.log_prob(0 * one, one, grade * one).exp() for grade in range(1, 6))
    assert 0.98 < known.item() < 1
    assert transform.inverse(torch.tensor([-1e300, 1e300])).tolist() == [1.0, 5.0]


def test_symlog_is_the_documents_phi_without_its_direction():
    v = torch.tensor([-99.9, 0.0, 99.9], dtype=torch.float64)
    assert symlog(v).tolist() == pytest.approx([-math.log(100.9), 0.0, math.log(100.9)])


def test_a_fit_is_robust_and_refuses_what_it_cannot_fit():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 1e9], dtype=torch.float64)
    fitted = ValueTransform.fit("affine", values)
    assert (fitted.center, fitted.width) == (3.0, 1.0)
    assert ValueTransform.fit("affine", torch.full((9,), 5.0)).width == 1.0
    assert ValueTransform.fit("identity", values) == ValueTransform()
    for bad, message in ((values[:0], "no number"), (torch.tensor([1.0, math.nan]), "not finite")):
        with pytest.raises(ValueError, match=message):
            ValueTransform.fit("affine", bad)
    with pytest.raises(ValueError, match="unknown value transform"):
        ValueTransform("logarithm")
    with pytest.raises(ValueError, match="'log' needs a support above 0"):
        ValueTransform.fit("log", values)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("family", ["cauchy", "gaussian"])
def test_the_density_in_units_is_the_slope_of_the_cdf(transform, family):
    law = ValueLaw(transform, family)
    loc, scale = (torch.tensor([x], dtype=torch.float64) for x in (0.3, 1.2))
    value, step = torch.tensor([transform.inverse(torch.tensor(0.9)).item()], dtype=torch.float64), 1e-4
    slope = (law.cdf(loc, scale, value + step) - law.cdf(loc, scale, value - step)) / (2 * step)
    torch.testing.assert_close(law.log_prob(loc, scale, value).exp(), slope, rtol=1e-5, atol=0)


def test_quantiles_go_through_the_transform_exactly():
    law = ValueLaw(ValueTransform("symlog", 6.0, 0.2))
    loc, scale = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])
    torch.testing.assert_close(law.quantile(loc, scale, 0.5), law.transform.inverse(loc))
    low, high = law.interval(loc, scale, 0.8)
    torch.testing.assert_close(law.cdf(loc, scale, low), torch.full((2,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(law.cdf(loc, scale, high), torch.full((2,), 0.9, dtype=torch.float64))
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match="strictly between"):
            law.quantile(loc, scale, bad)
        with pytest.raises(ValueError, match="strictly between"):
            law.interval(loc, scale, bad)


def test_crps_through_a_symlog_is_finite_and_clipped():
    law = ValueLaw(ValueTransform("symlog", 6.0, 1.0), value_range=(3.0, 5869.0))
    loc, scale, value = (torch.tensor([x], dtype=torch.float64) for x in (0.0, 5.0, 400.0))
    quantiles = law.clip(
        law.transform.inverse(loc.unsqueeze(-1) + scale.unsqueeze(-1) * law.stable.quantile(CRPS_LEVELS))
    )
    assert quantiles.min() >= 3.0 - 5866.0 and quantiles.max() <= 5869.0 + 5866.0
    assert torch.isfinite(law.crps(loc, scale, value)).all()
    affine = ValueLaw(ValueTransform("affine", 400.0, 50.0), value_range=(-1e9, 1e9))
    closed, by_quantiles = affine.crps(loc, scale, value), affine.quantile_crps(loc, scale, value)
    torch.testing.assert_close(closed, by_quantiles, rtol=0.1, atol=0)


@pytest.mark.parametrize("count", [50, 400])
def test_recalibrated_intervals_cover_what_they_promise(count):
    """The law is twice too wide; levels fitted on some rows mend its intervals on others."""
    generator = torch.Generator().manual_seed(count)
    truth = ValueLaw(family="cauchy").stable
    draws = truth.quantile(torch.rand(count + 20_000, generator=generator, dtype=torch.float64))
    loc, scale = torch.zeros_like(draws), torch.full_like(draws, 2.0)
    levels = ValueLaw().fit_interval_levels(loc[:count], scale[:count], draws[:count])
    assert list(levels) == sorted(levels) and levels[0] == 0.0 and levels[-1] < 1.0
    law = ValueLaw(interval_levels=levels)
    for level in (0.5, 0.8, 0.9):
        low, high = law.interval(loc[count:], scale[count:], level)
        covered = ((low <= draws[count:]) & (draws[count:] <= high)).double().mean().item()
        assert covered == pytest.approx(level, abs=2.5 * (level * (1 - level) / count) ** 0.5)
        raw_low, raw_high = law.interval(loc[count:], scale[count:], level, raw=True)
        assert ((raw_low <= draws[count:]) & (draws[count:] <= raw_high)).double().mean().item() > level + 0.03
    torch.testing.assert_close(law.quantile(loc[:1], scale[:1], 0.5), loc[:1])


@pytest.mark.parametrize("support", [Support(0.0, None, 1.0), Support(0.0, 3.0, None), Support(1.0, 5.0, 1.0)])
def test_of_a_law_that_is_right_recalibration_moves_no_quantile_whatever_its_atoms(support):
    """Most values are the least one: a level that only has to reach them would say that nearly all are."""
    generator = torch.Generator().manual_seed(0)
    law = ValueLaw(ValueTransform("affine", 0.0, 1.0, support=support), "gaussian")
    loc, scale = torch.full((4000,), -1.0, dtype=torch.float64), torch.full((4000,), 2.0, dtype=torch.float64)
    values = law.quantile(loc, scale, torch.rand(4000, generator=generator, dtype=torch.float64))
    assert (values == support.low).double().mean() > 0.6
    levels = torch.tensor(law.fit_interval_levels(loc, scale, values), dtype=torch.float64)
    torch.testing.assert_close(levels[:-1], WANTED_LEVELS[:-1], atol=0.03, rtol=0)
    ((least, of_all),) = law.fit_interval_kinds(loc, scale, values)
    assert least == 0 and of_all == levels.tolist()
    fitted = replace(law, interval_levels=tuple(of_all))
    p = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    moved = (fitted.quantile(loc[:1], scale[:1], p) == support.low).double().mean()
    assert moved.item() == pytest.approx((values == support.low).double().mean().item(), abs=0.04)


def test_an_atom_counts_with_the_middles_of_equal_parts_of_what_it_takes():
    law = ValueLaw(ValueTransform("affine", 0.0, 1.0, support=Support(0.0, None, 1.0)), "gaussian")
    loc, scale, values = torch.tensor([0.7, -1.0]), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.0])
    normal = torch.distributions.Normal(loc.double(), scale.double())
    low, high = normal.cdf(torch.tensor([1.5, -math.inf])), normal.cdf(torch.tensor([2.5, 0.5]))
    for row, levels in enumerate(law.spread_levels(loc, scale, values)):
        width = (high[row] - low[row]) / PARTS
        expected = [abs(2 * (low[row] + width * (part + 0.5)).item() - 1) for part in range(PARTS)]
        torch.testing.assert_close(levels, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


@pytest.mark.parametrize("certain", [0.02, 0.3])
def test_constants_beside_uncertain_numbers_do_not_narrow_their_intervals(certain):
    """Half of the numbers are one constant, whose law is sure or gives it nine tenths; the law of the others is too narrow."""
    law = ValueLaw(ValueTransform("affine", 0.0, 1.0, support=Support(0.0, None, 1.0)), "gaussian")

    def numbers(count, generator):
        loc, scale = torch.full((count,), 40.0).double(), torch.full((count,), 10.0).double()
        values = (loc + 15 * torch.randn(count, generator=generator).double()).round().clamp(min=0)
        loc[::2], scale[::2], values[::2] = 7.0, certain, 7.0
        return loc, scale * (1 + 0.1 * torch.rand(count, generator=generator).double()), values

    covered = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        (_, first), *more = law.fit_interval_kinds(*numbers(400, generator))
        kinds = tuple((least, tuple(levels)) for least, levels in more)
        assert len(kinds) == 1
        fitted = replace(law, interval_levels=tuple(first), interval_kinds=kinds)
        loc, scale, values = (column[1::2] for column in numbers(4000, generator))
        ends = (fitted.interval(loc, scale, level) for level in (0.5, 0.8, 0.9))
        covered.append([((low <= values) & (values <= high)).double().mean().item() for low, high in ends])
    assert torch.tensor(covered).mean(0).tolist() == pytest.approx([0.5, 0.8, 0.9], abs=0.04)


def test_a_tail_that_float64_cannot_hold_ends_where_the_support_does():
    support = Support(0.0, 0.8, 0.1)
    law = ValueLaw(ValueTransform("symlog", 0.0, 1.0, support=support), "cauchy")
    one = torch.ones(1, dtype=torch.float64)
    assert law.quantile(one, 10 * one, 0.9999).item() == 0.8 and law.quantile(one, 10 * one, 0.0001).item() == 0.0


def test_a_value_that_is_no_atom_counts_with_its_one_level():
    generator = torch.Generator().manual_seed(1)
    law = ValueLaw(family="cauchy")
    loc, scale, values = torch.randn(3, 150, generator=generator, dtype=torch.float64).unbind()
    spread = law.spread_levels(loc, scale.exp(), values)
    central = law.central_level(loc, scale.exp(), values)
    torch.testing.assert_close(spread, central.unsqueeze(-1).expand(150, PARTS), atol=1e-12, rtol=0)
    ascending = central.sort().values
    levels = law.fit_interval_levels(loc, scale.exp(), values)
    for place, wanted in enumerate(WANTED_LEVELS.tolist()[1:-1], 1):
        rank = math.ceil(151 * wanted - 1e-9)
        needed = ascending[rank - 1] if rank <= 150 else (1 + ascending[-1]) / 2
        assert levels[place] == pytest.approx(needed.item(), abs=1e-9)


HOSTILE = [
    "1..", "..1", "5.1..", "1,", "1-(", "(1-", "v-", "1", "1,1", "111,", "1 ", "三", "一十", "三百零", "百分之三", "`a", "``",
    "one thousand ", "½", "1 111 ", "$1 000 ", "\n(1", "\n–1,", "::", "a1:", "0 11-", "$x", "$$", "R1,000", "USD",
    "minus ", "two point one ", "two and a half ", "6 million 5 ", "1.111,", "零点", "三点", "负", "1万零", "3个", "ISBN 1-",
    "tel 1 ", "+1/", "1–", "€1K–", "1 to ", "1 234,", "\n–$", "(\t$1", "1.5,", "1.e", "1-½", "point five ",
    "one point ten ",
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_no_text_takes_the_scanner_quadratic_time(unit):
    """A server reads whatever it is sent; looking ahead without a bound took a minute for the first of these."""

    def scan(length):
        with contextlib.suppress(ValueError):  # a number of 60,000 digits
            find_numbers("1 " + unit * (length // len(unit)), ALL)

    short, long = (timeit.timeit(partial(scan, n), timer=time.process_time, number=1) for n in (15_000, 60_000))
    assert long < 8 * short + 0.2  # 16 times


def likeliest(quantiles: list[float], log_prob: list[float], law: ValueLaw) -> float:
    """`ValueLaw.mode` of one number, run by run."""
    support, (least, greatest) = law.transform.support, law.value_range or (-math.inf, math.inf)
    unseen = [end for end in (support.low, support.high) if end is not None and not least <= end <= greatest]
    runs = [quantiles[first : first + 16] for first in range(199 - 15)]
    runs = [run for run in runs if not set(run) & set(unseen)] or [quantiles]
    shortest = min(run[-1] - run[0] for run in runs)
    within = {value for run in runs if run[-1] - run[0] == shortest for value in run}
    return max(sorted(within), key=dict(zip(quantiles, log_prob, strict=True)).__getitem__)


SKEWED = torch.from_numpy(np.exp(np.random.default_rng(0).normal(12, 0.6, 200)))
FEW = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).repeat(20)
WITH_ZEROS = torch.cat([SKEWED, torch.zeros(60)])


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
@pytest.mark.parametrize("kind", ["affine", "log", "symlog", "quantile"])
@pytest.mark.parametrize("values", [SKEWED, FEW, SKEWED.round(), WITH_ZEROS], ids=["skewed", "few", "whole", "zeros"])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_mode_is_the_likeliest_where_quantiles_lie_closest(values, kind, family, is_known):
    if kind == "log" and not values.min() > 0:
        pytest.skip("a logarithm needs positive values")
    transform = ValueTransform.fit(kind, values, Support.seen_in(values))
    law = ValueLaw(transform, family, (values.min().item(), values.max().item()) if is_known else None)
    loc = torch.tensor([[-9.0], [-1.0], [0.0], [0.3], [2.0]], dtype=torch.float64)
    for scale in (0.05, 0.6, 1.0, 3.0):
        scales = torch.full_like(loc, scale)
        modes = law.mode(loc, scales)
        for mode, at, one_scale in zip(modes, loc, scales, strict=True):
            quantiles = law.quantile(at, one_scale, CRPS_LEVELS)
            log_prob = law.log_prob(at.expand(199), one_scale.expand(199), quantiles)
            assert mode.item() == likeliest(quantiles.tolist(), log_prob.tolist(), law)


def test_an_end_of_the_support_is_the_mode_only_where_much_lies_beyond_it():
    """Its probability is no density: it was the mode of most laws, in most units, from half a percent of the probability on."""
    law = ValueLaw(ValueTransform.fit("affine", SKEWED, Support.seen_in(SKEWED)), "gaussian")
    floor = torch.tensor([law.transform.support.low], dtype=torch.float64)
    at_zero, scales = torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    below = law.cdf(at_zero, scales, floor).flatten().tolist()
    assert 0.01 < below[0] < 0.02 and 0.1 < below[1] < 0.2
    medians, modes = law.quantile(at_zero, scales, 0.5), law.mode(at_zero, scales)
    assert modes[0] == medians[0] and modes[1] == floor
    seen = replace(law, value_range=(SKEWED.min().item(), SKEWED.max().item()))  # nobody was ever there
    assert seen.mode(at_zero, scales).equal(medians) and seen.mode(at_zero - 99, scales)[0] == floor
    thousand = ValueLaw(ValueTransform.fit("affine", 1000 * SKEWED, Support.seen_in(1000 * SKEWED)), "gaussian")
    torch.testing.assert_close(thousand.mode(at_zero, scales), 1000 * modes)
    zeros = ValueLaw(ValueTransform.fit("affine", WITH_ZEROS, Support.seen_in(WITH_ZEROS)), "gaussian", (0.0, 1e6))
    assert zeros.cdf(at_zero, scales, torch.zeros(1))[1] > 0.1 and zeros.mode(at_zero, scales)[1] == 0  # rows are 0
