/*
 * main.c - dcptool: looks into, checks, extracts from, copies and reshards checkpoints of PyTorch.
 *
 * Finds the command and hands it the rest of the arguments; each command parses its own.
 */
#include "cli.h"

#include <langinfo.h>
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"ls", cmd_ls},           {"info", cmd_info},       {"cat", cmd_cat},   {"hash", cmd_hash},
    {"verify", cmd_verify},   {"latest", cmd_latest},   {"copy", cmd_copy}, {"merge", cmd_merge},
    {"reshard", cmd_reshard}, {"convert", cmd_convert}, {"diff", cmd_diff}, {"demo", cmd_demo},
};

static const char doc[] =
    "Look into, check, extract from and copy checkpoints that PyTorch wrote, without Python.\n"
    "\n"
    "Commands:\n"
    "  ls CKPT [PATTERN]      list what is in a checkpoint\n"
    "  info CKPT              layout, writer, ranks, files, sizes\n"
    "  cat CKPT FQN [SLICE]   show or extract one value, whole or in part\n"
    "  hash CKPT              a digest of every item\n"
    "  verify CKPT            check files, bounds, coverage and checksums\n"
    "  latest DIR             the newest complete checkpoint below a directory\n"
    "  diff A B               show where two checkpoints differ\n"
    "  copy SRC DST           write a clean checkpoint from any other\n"
    "  merge SRC DST          unite what ranks have saved without communication\n"
    "  reshard SRC DST        rewrite a checkpoint for another number of ranks\n"
    "  convert SRC DST        turn a checkpoint into one of another form\n"
    "  demo [DIR]             save, reload and check a made-up training state\n"
    "\v"
    "CKPT is a directory that torch.distributed.checkpoint wrote (also rank by rank), a torch.save file, a safetensors file "
    "or a Hugging Face directory. 'dcptool COMMAND --help' tells more.\n"
    "\n"
    "Example: list a checkpoint, then look at one row of a tensor\n"
    "  dcptool ls run/step-1000\n"
    "  dcptool cat run/step-1000 model.weight 3\n"
    "\n"
    "Exit status: 0 good, 1 found a problem or failed, 2 wrong usage.";

typedef struct invocation {
    int argc;
    char **argv;
    const command *cmd;
} invocation;

static const command *find_command(const char *name)
{
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    invocation *inv = state->input;
    switch (key) {
    case ARGP_KEY_ARG:
        inv->cmd = find_command(arg);
        if (!inv->cmd) {
            argp_error(state, "unknown command '%s'", arg);
        }
        inv->argc = state->argc - state->next + 1;
        inv->argv = state->argv + state->next - 1;
        state->next = state->argc;
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "no command given"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static void print_version(FILE *out, struct argp_state *state)
{
    (void)state;
    fprintf(out, "dcptool %s\n", dcp_version());
}

/* Names are UTF-8. Without a UTF-8 locale, as in most containers, tables would replace every character beyond ASCII. Only
 * the kind of characters follows the environment: numbers must not get a decimal comma. */
static void set_characters(void)
{
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) {
        setlocale(LC_CTYPE, "C.UTF-8");
    }
}

/* Every way out passes here, also argp's, which leaves through exit after the help or the version. */
static void close_at_exit(void)
{
    if (!output_close()) {
        _Exit(EXIT_PROBLEM);
    }
}

static int run(const invocation *inv)
{
    char name[32];
    snprintf(name, sizeof name, "dcptool %s", inv->cmd->name);
    inv->argv[0] = name;
    return inv->cmd->run(inv->argc, inv->argv);
}

int main(int argc, char **argv)
{
    const struct argp argp = {.parser = parse, .args_doc = "COMMAND [ARGUMENT...]", .doc = doc};
    invocation inv = {0};
    char name[] = "dcptool";
    set_characters();
    argp_err_exit_status = EXIT_USAGE;
    argp_program_version_hook = print_version;
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is a failed write, which is reported */
    atexit(close_at_exit);
    if (argc > 0) {
        argv[0] = name;
    }
    argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &inv);
    return run(&inv);
}
