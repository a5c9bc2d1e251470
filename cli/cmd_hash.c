/* cmd_hash.c - dcptool hash: a digest of every item, whatever its sharding. */
#include "cli.h"
#include "escape.h"
#include "item_list.h"
#include "json_writer.h"
#include "progress.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

static const char doc[] =
    "Print the SHA-256 of every item, sorted by name. Two checkpoints with the same values have the same digests, however many "
    "ranks and files they were written by.\n"
    "\v"
    "The digest of a tensor is that of its elements, row-major and little-endian; of an object, that of its Python repr in "
    "UTF-8. Values that single ranks have of their own have the rank behind the name.\n"
    "\n"
    "--json prints {\"tensors\": {fqn: {dtype, shape, sha256}}, \"objects\": {fqn: repr}, \"world\": ranks}; of a checkpoint "
    "written "
    "rank by rank also \"rank_local\" and \"per_rank\": {rank: {fqn: {dtype, shape, sha256}}}, where an object is its repr.\n"
    "\n"
    "Examples:\n"
    "  dcptool hash run/step-1000\n"
    "  diff <(dcptool hash a) <(dcptool hash b) && echo same";

static error_t parse(int key, char *arg, struct argp_state *state)
{
    return options_parse_path(key, arg, state, state->input);
}

/* Digests are all made before the first is printed: half a list could be taken for a whole one. */
typedef struct digest {
    const dcp_item *item;
    uint8_t sha256[32];
    char *repr; /* of objects; freed with dcp_text_free */
    size_t repr_len;
} digest;

static dcp_status digest_object(dcp_checkpoint *ck, digest *d, dcp_error *err)
{
    dcp_value *value;
    dcp_status rc = dcp_read_object(ck, d->item, &value, err);
    if (rc != DCP_OK) {
        return rc;
    }
    rc = item_repr(d->item, value, &d->repr, &d->repr_len, err);
    dcp_value_free(value);
    if (rc == DCP_OK && !EVP_Digest(d->repr, d->repr_len, d->sha256, NULL, EVP_sha256(), NULL)) {
        complain("libcrypto has no SHA-256");
        exit(EXIT_PROBLEM);
    }
    return rc;
}

static dcp_status digest_item(dcp_checkpoint *ck, digest *d, dcp_error *err)
{
    return d->item->kind == DCP_ITEM_TENSOR ? dcp_item_sha256(ck, d->item, d->sha256, err) : digest_object(ck, d, err);
}

static uint64_t total_bytes(const digest *digests, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += digests[i].item->bytes;
    }
    return sum;
}

static bool digest_all(dcp_checkpoint *ck, digest *digests, size_t n, bool is_quiet)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_status rc = DCP_OK;
    progress p;
    uint64_t done = 0, total = total_bytes(digests, n);
    progress_start(&p, is_quiet);
    for (size_t i = 0; i < n && rc == DCP_OK; i++) {
        rc = digest_item(ck, &digests[i], &err);
        done += digests[i].item->bytes;
        progress_update(&p, done, total);
    }
    progress_clear(&p);
    if (rc != DCP_OK) {
        complain_error(&err);
    }
    return rc == DCP_OK;
}

static const char *to_hex(const uint8_t sha256[32], char out[65])
{
    for (size_t i = 0; i < 32; i++) {
        sprintf(out + 2 * i, "%02x", sha256[i]);
    }
    return out;
}

static void print_lines(const digest *digests, size_t n)
{
    char hex[65];
    for (size_t i = 0; i < n; i++) {
        printf("%s  ", to_hex(digests[i].sha256, hex));
        escape_print(stdout, digests[i].item->fqn, ESCAPE_NAME);
        if (digests[i].item->rank >= 0) {
            printf("  rank %d", digests[i].item->rank);
        }
        fputc('\n', stdout);
    }
}

/* ---- JSON ---- */

static void digest_json(json_writer *w, const digest *d)
{
    char hex[65];
    jw_key(w, d->item->fqn);
    if (d->item->kind == DCP_ITEM_OBJECT) {
        jw_string(w, (dcp_str){d->repr, d->repr_len});
        return;
    }
    jw_begin(w, '{');
    jw_key_string(w, "dtype", dcp_dtype_name(d->item->dtype));
    jw_key_string(w, "sha256", to_hex(d->sha256, hex));
    jw_key_shape(w, "shape", d->item->ndim, d->item->extents);
    jw_end(w, '}');
}

static void common_json(json_writer *w, const char *key, dcp_item_kind kind, const digest *digests, size_t n)
{
    jw_key_begin(w, key, '{');
    for (size_t i = 0; i < n; i++) {
        if (digests[i].item->kind == kind && digests[i].item->rank < 0) {
            digest_json(w, &digests[i]);
        }
    }
    jw_end(w, '}');
}

static int compare_ranks(const void *a, const void *b)
{
    const dcp_item *x = ((const digest *)a)->item, *y = ((const digest *)b)->item;
    return x->rank == y->rank ? item_compare(x, y) : x->rank < y->rank ? -1 : 1;
}

/* Sorts the digests by rank, those common to all first. */
static void per_rank_json(json_writer *w, digest *digests, size_t n)
{
    int rank = -1;
    qsort(digests, n, sizeof *digests, compare_ranks);
    jw_key_begin(w, "per_rank", '{');
    for (size_t i = 0; i < n; i++) {
        if (digests[i].item->rank != rank) {
            char key[16];
            if (rank >= 0) {
                jw_end(w, '}');
            }
            rank = digests[i].item->rank;
            snprintf(key, sizeof key, "%d", rank);
            jw_key_begin(w, key, '{');
        }
        if (rank >= 0) {
            digest_json(w, &digests[i]);
        }
    }
    if (rank >= 0) {
        jw_end(w, '}');
    }
    jw_end(w, '}');
}

static void print_json(const dcp_checkpoint_info *info, digest *digests, size_t n)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    common_json(&w, "objects", DCP_ITEM_OBJECT, digests, n);
    if (info->layout == DCP_LAYOUT_RANK_LOCAL) {
        per_rank_json(&w, digests, n);
        jw_key_bool(&w, "rank_local", true);
    }
    common_json(&w, "tensors", DCP_ITEM_TENSOR, digests, n);
    jw_key_uint(&w, "world", info->world > 0 ? (uint64_t)info->world : 1); /* nothing tells: one rank at least */
    jw_end(&w, '}');
}

static int hash(dcp_checkpoint *ck, const options *opts)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    size_t n;
    if (dcp_checkpoint_get_info(ck, &info, &err) != DCP_OK) {
        complain_error(&err);
        return EXIT_PROBLEM;
    }
    const dcp_item **items = item_list_by_name(ck, &n);
    digest *digests = must_alloc(n, sizeof *digests);
    for (size_t i = 0; i < n; i++) {
        digests[i] = (digest){.item = items[i]};
    }
    bool is_good = digest_all(ck, digests, n, opts->quiet);
    if (is_good && opts->json) {
        print_json(&info, digests, n);
    } else if (is_good) {
        print_lines(digests, n);
    }
    for (size_t i = 0; i < n; i++) {
        dcp_text_free(opts->ctx, digests[i].repr);
    }
    free(digests);
    free(items);
    return is_good ? EXIT_GOOD : EXIT_PROBLEM;
}

int cmd_hash(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {NULL, parse, "CKPT", doc, children, NULL, NULL};
    options opts = {.check_crc = true};
    options_parse(&argp, argc, argv, &opts);
    dcp_checkpoint *ck = options_open(&opts);
    if (!ck) {
        return EXIT_PROBLEM;
    }
    int status = hash(ck, &opts);
    options_close(&opts, ck);
    return status;
}
