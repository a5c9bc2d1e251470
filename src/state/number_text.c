#include "state/number_text.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- floats ---- */

/* Significant digits d[0] . d[1] d[2] .. times 10^exponent. */
typedef struct decimal {
    char digits[20];
    int n;
    int exponent;
} decimal;

static uint64_t bits_of(double d)
{
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    return bits;
}

#define EXPONENT_BITS UINT64_C(0x7FF0000000000000)
#define FRACTION_BITS UINT64_C(0x000FFFFFFFFFFFFF)
#define SIGN_BIT UINT64_C(0x8000000000000000)

/* printf and strtod may write and expect another decimal point than "." here: the locale is the program's. */
static void split(const char *text, decimal *out)
{
    out->n = 0;
    for (; *text && *text != 'e'; text++) {
        if (*text >= '0' && *text <= '9') {
            out->digits[out->n++] = *text;
        }
    }
    out->exponent = (int)strtol(text + 1, NULL, 10);
}

static double read_back(const decimal *x)
{
    char text[40];
    snprintf(text, sizeof text, "%.*se%d", x->n, x->digits, x->exponent - (x->n - 1));
    return strtod(text, NULL);
}

/* The next larger number of as many digits. */
static void round_up(decimal *x)
{
    int i = x->n - 1;
    for (; i >= 0 && x->digits[i] == '9'; i--) {
        x->digits[i] = '0';
    }
    if (i >= 0) {
        x->digits[i]++;
    } else {
        x->digits[0] = '1';
        x->exponent++;
    }
}

/* Digits of a positive finite number, as few as read back exactly. Numbers of 15 digits always survive, so that the usual search
 * is short; subnormals have fewer digits. */
static decimal shortest(double d)
{
    uint64_t bits = bits_of(d);
    bool is_subnormal = !(bits & EXPONENT_BITS), is_power_of_2 = !(bits & FRACTION_BITS);
    decimal x;
    for (int n = is_subnormal ? 1 : 15;; n++) {
        char text[40];
        snprintf(text, sizeof text, "%.*e", n - 1, d);
        split(text, &x);
        if (n == 17 || read_back(&x) == d) {
            break;
        }
        /* Below a power of two, doubles are closer together: the nearest decimal may fail and the next one above succeed. */
        if (is_power_of_2) {
            round_up(&x);
            if (read_back(&x) == d) {
                break;
            }
        }
    }
    while (x.n > 1 && x.digits[x.n - 1] == '0') {
        x.n--;
    }
    return x;
}

static int fixed_text(const decimal *x, bool wants_point, char *out, size_t size)
{
    if (x->exponent < 0) {
        return snprintf(out, size, "0.%.*s%.*s", -x->exponent - 1, "000", x->n, x->digits);
    }
    int whole = x->exponent + 1;
    if (x->n > whole) {
        return snprintf(out, size, "%.*s.%.*s", whole, x->digits, x->n - whole, x->digits + whole);
    }
    int len = snprintf(out, size, "%.*s", x->n, x->digits);
    for (int i = x->n; i < whole; i++) {
        out[len++] = '0';
    }
    return len + snprintf(out + len, size - (size_t)len, "%s", wants_point ? ".0" : "");
}

static int finite_text(double d, bool wants_point, char *out, size_t size)
{
    decimal x = {.digits = "0", .n = 1};
    if (d != 0) {
        x = shortest(d);
    }
    if (x.exponent >= -4 && x.exponent < 16) {
        return fixed_text(&x, wants_point, out, size);
    }
    char sign = x.exponent < 0 ? '-' : '+';
    int magnitude = abs(x.exponent);
    if (x.n == 1) {
        return snprintf(out, size, "%ce%c%02d", x.digits[0], sign, magnitude);
    }
    return snprintf(out, size, "%c.%.*se%c%02d", x.digits[0], x.n - 1, x.digits + 1, sign, magnitude);
}

size_t dcp__float_text(double d, int style, char out[DCP__FLOAT_TEXT_BYTES])
{
    uint64_t bits = bits_of(d);
    bool is_nan = (bits & EXPONENT_BITS) == EXPONENT_BITS && (bits & FRACTION_BITS);
    bool is_negative = (bits & SIGN_BIT) && !is_nan;
    size_t len = 0;
    if (is_negative || (style & DCP__FLOAT_SIGN)) {
        out[len++] = is_negative ? '-' : '+';
    }
    size_t left = DCP__FLOAT_TEXT_BYTES - len;
    if ((bits & EXPONENT_BITS) == EXPONENT_BITS) {
        return len + (size_t)snprintf(out + len, left, "%s", is_nan ? "nan" : "inf");
    }
    return len + (size_t)finite_text(is_negative ? -d : d, style & DCP__FLOAT_POINT, out + len, left);
}

/* ---- integers ---- */

#define GROUP UINT32_C(1000000000) /* nine digits at a time */

uint64_t dcp__bigint_steps(size_t len)
{
    uint64_t limbs = (uint64_t)len / 4 + 1;
    return limbs > UINT32_MAX ? UINT64_MAX : limbs * limbs;
}

static void load_magnitude(uint32_t *limbs, size_t n, const uint8_t *bytes, size_t len)
{
    bool is_negative = bytes[len - 1] & 0x80;
    memset(limbs, is_negative ? 0xFF : 0, n * sizeof *limbs);
    memcpy(limbs, bytes, len);
    uint64_t carry = is_negative;
    for (size_t i = 0; is_negative && i < n; i++) {
        carry += (uint32_t)~limbs[i];
        limbs[i] = (uint32_t)carry;
        carry >>= 32;
    }
}

/* Divides by GROUP in place, returns the remainder. */
static uint32_t next_group(uint32_t *limbs, size_t *n)
{
    uint64_t rest = 0;
    for (size_t i = *n; i-- > 0;) {
        rest = rest << 32 | limbs[i];
        limbs[i] = (uint32_t)(rest / GROUP);
        rest %= GROUP;
    }
    while (*n && !limbs[*n - 1]) {
        --*n;
    }
    return (uint32_t)rest;
}

bool dcp__bigint_text(dcp__buf *out, const uint8_t *bytes, size_t len)
{
    size_t n = len / 4 + 1, n_groups = 0;
    uint32_t *limbs = dcp__calloc(out->ctx, n, sizeof *limbs);
    uint32_t *groups = dcp__calloc(out->ctx, n, 2 * sizeof *groups); /* log(2^32) / log(10^9) < 2 */
    if (limbs && groups) {
        load_magnitude(limbs, n, bytes, len);
        do {
            groups[n_groups++] = next_group(limbs, &n);
        } while (n);
        dcp__buf_printf(out, "%s%u", bytes[len - 1] & 0x80 ? "-" : "", groups[n_groups - 1]);
        for (size_t i = n_groups - 1; i-- > 0;) {
            dcp__buf_printf(out, "%09u", groups[i]);
        }
    }
    bool ok = limbs && groups && !out->failed;
    dcp__free(out->ctx, limbs);
    dcp__free(out->ctx, groups);
    return ok;
}
