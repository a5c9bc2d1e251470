/* What N ranks save in one layout M ranks load in another one: many random cases, against a dense reference. DCP_TEST_SEED
 * repeats a run, DCP_TEST_ROUNDS makes it that many times as long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/rank_model.h"

#define CASES 1500

static int times(int cases)
{
    const char *text = getenv("DCP_TEST_ROUNDS");
    return cases * (text ? atoi(text) : 1);
}

static void save_and_load(model *m, int round)
{
    rank_thread ranks[TEST_MAX_RANKS];
    run_ranks(m->n_saving, save_rank, m, ranks);
    expect_all(ranks, m->n_saving, DCP_OK, round);
    check_whole(m);
    run_ranks(m->n_loading, load_rank, m, ranks);
    expect_all(ranks, m->n_loading, DCP_OK, round);
}

static void any_layout__on_any_number_of_ranks_loads_in_any_other(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("any layout");
    for (int i = 0; i < times(CASES); i++) {
        model m;
        random_model(&rnd, &m);
        save_and_load(&m, i);
        free_model(&m);
    }
}

static void any_layout__on_sixteen_to_sixty_four_ranks(void **unused)
{
    (void)unused;
    static const int sizes[] = {16, 33, 64};
    test_random rnd = test_random_seeded("many ranks");
    for (int i = 0; i < times(12); i++) {
        model m;
        random_model(&rnd, &m);
        m.n_saving = sizes[i % 3];
        m.n_loading = i % 4 == 3 ? 1 + (int)test_random_below(&rnd, 9) : sizes[(i + 1) % 3];
        save_and_load(&m, i);
        free_model(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_layout__on_any_number_of_ranks_loads_in_any_other),
        cmocka_unit_test(any_layout__on_sixteen_to_sixty_four_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
