#include "table.h"

#include "cli.h"

#include <errno.h>
#include <libsmartcols.h>
#include <stdlib.h>

/* libsmartcols fails for want of memory only. */
static void must(int failed)
{
    if (failed) {
        complain("out of memory");
        exit(EXIT_PROBLEM);
    }
}

static struct libscols_table *inner(table *t)
{
    return (struct libscols_table *)t;
}

table *table_create(void)
{
    struct libscols_table *t = scols_new_table();
    must(!t);
    must(scols_table_enable_noencoding(t, 1) != 0); /* cells are escaped already, and backslashes are meant */
    return (table *)t;
}

void table_column(table *t, const char *title, table_align align)
{
    static const int flags[] = {[TABLE_LEFT] = 0, [TABLE_RIGHT] = SCOLS_FL_RIGHT, [TABLE_TREE] = SCOLS_FL_TREE};
    must(!scols_table_new_column(inner(t), title, 0, flags[align]));
}

table_row *table_row_add(table *t, table_row *parent)
{
    struct libscols_line *line = scols_table_new_line(inner(t), (struct libscols_line *)parent);
    must(!line);
    return (table_row *)line;
}

void table_cell(table_row *row, int column, const char *text)
{
    must(scols_line_set_data((struct libscols_line *)row, (size_t)column, text) != 0);
}

void table_cell_printf(table_row *row, int column, const char *fmt, ...)
{
    char *text;
    va_list args;
    va_start(args, fmt);
    int len = vasprintf(&text, fmt, args);
    va_end(args);
    must(len < 0);
    table_cell(row, column, text);
    free(text);
}

void table_print(table *t)
{
    must(scols_print_table(inner(t)) == -ENOMEM);
    table_free(t);
}

void table_free(table *t)
{
    scols_unref_table(inner(t));
}
